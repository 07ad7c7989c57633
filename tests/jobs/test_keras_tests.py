"""Keras' own tests, the body of each in the scope of an MPIStrategy, on two ranks: which fail, and why.

The tests come with Keras' wheel. A test that hangs ends its job, and the next job goes on with the test after it.
"""

import importlib.util
from pathlib import Path

import pytest

from ..support.in_scope import End, ends_of
from ..support.jobs import run_job

pytestmark = pytest.mark.nightly

_KERAS = importlib.util.find_spec("keras")
_SOURCE = Path(_KERAS.origin).parent / "src" if _KERAS is not None and _KERAS.origin else Path("no Keras")
_HANGS = 5  # How many tests of a directory may hang before the others are not run.

# What is not run, and why.
IGNORED = {
    "callbacks": {"remote_monitor_test.py": "it imports the conftest.py of Keras' repository",
                  "orbax_checkpoint_test.py": "it needs orbax"},
    "trainers": {"data_adapters": "nothing of them knows of strategies, and they need JAX, PyTorch and pandas"},
    "optimizers": {}, "saving": {}, "models": {},
}
LEFT_OUT = {
    "callbacks/swap_ema_weights_test.py::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute":
        "it makes a MirroredStrategy, and resets TensorFlow's context, which later tests need",
}
# The tests that fail, by their names, and why. All others pass, or skip by themselves.
_PART = "outside of a replica Keras divides a loss by the number of replicas, which adds the parts up elsewhere"
_STEP = "a step has a part of the batch, whose loss Keras divides by the number of replicas, with any strategy"
_ERROR = "an error of the chief is a CollectiveError on the other ranks"
FAIL: dict[str, dict[str, tuple[str, ...]]] = {
    "callbacks": {
        "it has summaries of its own, which the chief alone writes": ("test_custom_summary",),
    },
    "trainers": {
        _PART: ("test_dict_output_case0", "test_dict_output_case1", "test_list_loss_dict_data",
                "test_list_output_case0", "test_list_output_case1", "test_single_output_case_with_crossentropy_loss",
                "test_struct_loss", "test_struct_loss_indice_path", "test_struct_loss_namedtuple",
                "test_struct_loss_valid_weights"),
        _STEP: ("test_compute_loss_no_training_backwards_compatibility", "test_evaluate_with_custom_compute_loss",
                "test_metric_update_in_compute_loss"),
        "predict_on_batch returns the rows of all ranks, each of which gives a batch of its own":
            ("test_nested_inputs",),
        "predictions of the ranks are gathered as dense tensors, and these are ragged":
            ("test_trainer_with_raggeds_functional", "test_trainer_with_raggeds_layer",
             "test_trainer_with_raggeds_model"),
    },
    "optimizers": {
        "Keras' own LossScaleOptimizer refuses to be applied outside of a replica":
            ("test_apply_with_no_vars", "test_downscaling_stateful", "test_finite_step_stateful",
             "test_finite_step_with_inner_loss_scale_stateful", "test_finite_step_with_overwrite_stateful",
             "test_infinite_step_stateful", "test_iterations_update_stateful",
             "test_multi_optimizer_wrapped_in_loss_scale_optimizer", "test_sparse_correctness_loss_scale_optimizer_sgd",
             "test_sparse_gradients_loss_scale_optimizer_sgd", "test_upscaling_stateful"),
        "it waits for updates of the variable itself, and a strategy updates the component on this rank":
            ("test_sparse_gradients_adadelta", "test_sparse_gradients_adafactor", "test_sparse_gradients_adagrad",
             "test_sparse_gradients_rmsprop", "test_sparse_gradients_scatter_update", "test_sparse_gradients_sgd"),
    },
    "saving": {
        _ERROR: ("test_save_unzipped", "test_save_weights_only_with_unbuilt_model"),
        "a save that fails leaves the file of before, or none":
            ("test_save_model_exception_raised_high_memory_config",
             "test_save_model_exception_raised_low_memory_config"),
        "collectives are errors in a process that a rank has forked": ("test_load_model_concurrently",),
        "its file is not in the wheel": ("test_legacy_load_skips_missing_nested_containers",),
    },
    "models": {
        _ERROR: ("test_export_error",),
        "TensorFlow splits no batch with None among the ranks: 'OptionalSpec' object has no attribute '_unbatch'":
            ("test_functional_optional_inputs_generator_optional_none",),
    },
}


@pytest.mark.parametrize("directory", IGNORED)
def test_those_that_fail_are_known(directory: str, tmp_path: Path) -> None:
    if not any((_SOURCE / directory).glob("*_test.py")):
        pytest.skip(f"this Keras comes without its tests of {directory}")
    ends = run(_SOURCE, directory, tmp_path / "ends")
    print(f"{directory}: {sum(end.outcome == 'passed' for end in ends.values())} of {len(ends)} pass, "
          f"{sum(end.outcome == 'skipped' for end in ends.values())} are skipped")
    reasons = {name: reason for reason, names in FAIL[directory].items() for name in names}
    wrong = {test: end for test, end in ends.items() if end.outcome in ("failed", "hangs")}
    new = [f"{test} {end.outcome}: {' | '.join(end.texts)}" for test, end in wrong.items()
           if test.split("::")[-1] not in reasons]
    mended = [test for test in ends if test not in wrong and test.split("::")[-1] in reasons]
    assert not new and not mended, "\n".join([*new, f"These pass now: {mended}"])


SAMPLE = """
import os
import time
import numpy as np
import pytest
import tensorflow as tf
import mpistrat

def test_passes():
    assert tf.distribute.get_strategy().num_replicas_in_sync == 2
    assert np.ptp(mpistrat.allgather(np.random.rand(1))) == 0

def test_fails_on_one_rank_alone():
    if mpistrat.rank():
        raise ValueError("of rank 1")
    mpistrat.barrier()

def test_skips():
    import a_package_that_is_not_there

def test_hangs():
    time.sleep(1000 * mpistrat.rank())
    mpistrat.barrier()

def test_comes_after():
    mpistrat.barrier()
"""


def test_a_test_that_hangs_and_one_that_fails_on_one_rank_cost_no_other(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "some_test.py").write_text(SAMPLE)
    ends = run(tmp_path, "own", tmp_path / "ends", test_s=15)
    outcomes = {test.removeprefix("own/some_test.py::test_"): end.outcome for test, end in ends.items()}
    assert outcomes == {"passes": "passed", "fails_on_one_rank_alone": "failed", "skips": "skipped", "hangs": "hangs",
                        "comes_after": "passed"}
    assert any("of rank 1" in text for text in ends["own/some_test.py::test_fails_on_one_rank_alone"].texts)


def run(root: Path, directory: str, file: Path, test_s: int = 240) -> dict[str, End]:
    """How the tests of a directory have ended, in as many jobs as it takes. `test_s` is the limit of one test."""
    command = ["python", "-m", "pytest", "-c", "/dev/null", "--rootdir", root, "-p", "no:cacheprovider",
               "-p", "tests.support.in_scope", "--ends", file, "-o", "python_files=*_test.py",
               "-o", f"faulthandler_timeout={test_s}", "-o", "faulthandler_exit_on_timeout=true", "-q", "-W", "ignore",
               *(f"--ignore={root / directory / name}" for name in IGNORED.get(directory, ())),
               *(f"--leave-out={test}" for test in LEFT_OUT), root / directory]
    hung = 0
    while True:
        job = run_job(2, command, limit_s=5400, env={
            "MPISTRAT_STALL_CHECK_TIME_SECONDS": "20", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "40"})
        ends = ends_of(file) if file.exists() else {}
        hanging = [test for test, end in ends.items() if end.outcome == "hangs"]
        if len(hanging) == hung:
            assert ends and "INTERNALERROR" not in job.output, job.output
            return ends
        hung = len(hanging)
        print(f"{hanging[-1]} does not end within {test_s} s, or ends its process:\n{job.output[-20000:]}")
        assert hung < _HANGS, f"these hang, and the rest is not run: {hanging}"
