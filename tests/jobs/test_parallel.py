"""Run tests/parallel, the same pytest session on every rank, with 2 ranks, and with 3 what a third rank can show."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import ROOT, run_job

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/parallel/test_*.py"))
# Each is a session of its own, so that none is long.
PARTS = {"strategy": [file for file in FILES if "test_strategy" in file and "sharded" not in file],
         "graphs": [file for file in FILES if any(name in file for name in (
             "nested_gradients", "gpu_tensorflow", "freed_graphs", "xla_collectives"))],
         "slow networks": [file for file in FILES if any(name in file for name in (
             "sharded", "quantised", "local_sgd"))],
         "checks": [file for file in FILES if any(name in file for name in ("first_steps", "fit_checks", "drift"))]}
KERAS_2 = "keras2"  # In processes whose tf.keras is Keras 2.
PARTS[KERAS_2] = [file for file in FILES if "test_keras2" in file]
PARTS["rest"] = [file for file in FILES if not any(file in part for part in PARTS.values())]
# What a third rank can show: other orders and ranks in between, sets and hosts of ranks, rows that do not divide.
THIRD_RANK = {
    "collectives": ("array_ops", "topology", "names", "process_sets", "join", "planes", "hosts_agreement"),
    "graphs and rows": ("tensorflow_ops", "scatter_ops", "gradient_tape", "strategy_collectives", "strategy_input",
                        "weighted_metrics", "quantised", "sharded", "local_sgd"),
}
# Tests of other files that two ranks skip. They run with "graphs and rows".
NEED_THREE = [f"tests/parallel/test_{test}" for test in (
    "cluster.py::test_roles_in_another_order_are_those_of_the_chief",
    "drift.py::test_ranks_of_a_process_set_are_named_as_ranks_of_the_job",
    "gpu_arrays.py::test_of_sets_that_overlap_one_uses_nccl_and_all_have_the_right_sums",
    "gpu_arrays.py::test_random_programs_of_sets_that_overlap",
    "throughput.py::test_a_process_set_measures_its_own_ranks")]
# Ranks, name, files, the tests of the session: one of three ranks is of the first level.
NOT_NIGHTLY, ALL = "not nightly", "nightly or not nightly"
SESSIONS = [(2, part, files, NOT_NIGHTLY) for part, files in PARTS.items()]
SESSIONS += [(3, part, [f"tests/parallel/test_{name}.py" for name in names] + NEED_THREE * (part == "graphs and rows"),
              NOT_NIGHTLY if part == "collectives" else ALL) for part, names in THIRD_RANK.items()]


def repeats(files: list[str]) -> list[str]:
    return [file for file in files if re.search(r"mark\.nightly|\bsample\(|@either_way", (ROOT / file).read_text())]


SESSIONS += [(2, part, files, "nightly") for part in PARTS if (files := repeats(PARTS[part]))]


@pytest.fixture
def watch(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print the progress of a session that runs in a job. Processes of pytest-xdist do not show it."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def show(text: str) -> None:
        for percentage in re.findall(r"\d+%(?=\])", text):
            reporter.write(f" {percentage}", flush=True)

    return show


@pytest.mark.parametrize("ranks, part, files, tests", [
    pytest.param(*session, marks=[] if session[3] == NOT_NIGHTLY else [pytest.mark.nightly],
                 id=f"{session[0]}-{session[1]}" + ("-nightly" if session[3] == "nightly" else ""))
    for session in SESSIONS])
def test_every_rank_passes(ranks: int, part: str, files: list[str], tests: str, watch: Callable[[str], None]) -> None:
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15", "-m", tests, *files]
    if part == KERAS_2:
        pytest.importorskip("tf_keras")
    env = {"TF_USE_LEGACY_KERAS": "1"} if part == KERAS_2 else {}
    job = run_job(ranks, command, env=env, limit_s=1200, watch=watch).well()
    assert " passed" in job.output, job.output
    print(job.output)
