"""Run tests/parallel, the same pytest session on every rank, with 2 and with 3 ranks.

The sessions of QUICK on 2 ranks leave out tests that are marked as long, and a session of its own runs those.
"""

import re
from collections.abc import Callable

import pytest

from .. import parts
from ..support.jobs import ROOT, needs_mpirun, run_job

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/parallel/test_*.py"))
# Each is a session of its own, so that none is long.
PARTS = {"strategy": [file for file in FILES if "test_strategy" in file and "sharded" not in file],
         "same bits": [file for file in FILES if "test_changed_results" in file],
         "graphs": [file for file in FILES if any(name in file for name in (
             "nested_gradients", "gpu_tensorflow", "freed_graphs", "xla_collectives"))],
         "slow networks": [file for file in FILES if any(name in file for name in (
             "sharded", "quantised", "local_sgd"))],
         "checks": [file for file in FILES if any(name in file for name in ("first_steps", "fit_checks", "drift"))]}
KERAS_2 = "keras2"  # In processes whose tf.keras is Keras 2.
PARTS[KERAS_2] = [file for file in FILES if "test_keras2" in file]
PARTS["rest"] = [file for file in FILES if not any(file in part for part in PARTS.values())]
# What a third rank would only repeat. What a rank does with graphs and files does not depend on the number of ranks.
ONCE = ("test_first_steps", "test_fit_checks", "test_nested_gradients", "test_freed_graphs",
        "test_strategy_files", "test_strategy_threads", "test_gpu_tensorflow", "test_written_once", "test_scale_page")

QUICK = ("strategy", "rest")
SESSIONS = [(ranks, part, tests) for ranks in (2, 3) for part in PARTS
            for tests in (("not long", "long") if ranks == 2 and part in QUICK else ("long or not long",))]


def files_of(part: str, ranks: int, tests: str) -> list[str]:
    """The files of a session; of a session of long tests those that have any."""
    files = [file for file in PARTS[part] if ranks == 2 or not file.removesuffix(".py").endswith(ONCE)]
    return files if tests != "long" else [file for file in files if "pytest.mark.long" in (ROOT / file).read_text()]


@pytest.fixture
def watch(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Print the progress of a session that runs in a job. Processes of pytest-xdist do not show it."""
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")

    def show(text: str) -> None:
        for percentage in re.findall(r"\d+%(?=\])", text):
            reporter.write(f" {percentage}", flush=True)

    return show


def chosen(request: pytest.FixtureRequest, session: tuple[int, str, str]) -> list[str]:
    """The files of a session that are to be run: all, or those that have changed lately if the session is in another
    part of the long tests (tests/parts.py).
    """
    ranks, part, tests = session
    number = request.config.getoption("--part")
    is_long = request.node.get_closest_marker("long") is not None
    files = files_of(part, ranks, tests)
    if number is None or not is_long or number == parts.part_of(parts.unit_of(request.node)):
        return files
    return [file for file in files if file in parts.changed_lately()]


@needs_mpirun
@pytest.mark.parametrize("ranks, part, tests", [
    pytest.param(ranks, part, tests, marks=[pytest.mark.quick] if tests == "not long" else [],
                 id=f"{ranks}-{part}" + ("-long" if tests == "long" else ""))
    for ranks, part, tests in SESSIONS if files_of(part, ranks, tests)])
def test_every_rank_passes(ranks: int, part: str, tests: str, watch: Callable[[str], None],
                           request: pytest.FixtureRequest) -> None:
    files = chosen(request, (ranks, part, tests))
    command = ["python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15", "-m", tests, *files]
    if part == KERAS_2:
        pytest.importorskip("tf_keras")
    env = {"TF_USE_LEGACY_KERAS": "1"} if part == KERAS_2 else {}
    job = run_job(ranks, command, env=env, limit_s=1200, watch=watch)
    assert job.code == 0, job.output
    assert " passed" in job.output, job.output
    print(job.output)
