"""The examples with torch and jax as their users start them: plain python, and under mpirun. Skipped without them."""

import importlib.util
import re
import sys

import pytest

from ..support.jobs import ROOT, needs_mpirun, run_job, run_limited

LAST_LINE = re.compile(r"test accuracy (\d\.\d{3}), \d+\.\d s, weights [0-9a-f]{64}, the same on all ranks \((\d+)\)")

every_library = pytest.mark.parametrize("library", ["torch", "jax"])


def script_of(library: str) -> str:
    """The path of its example."""
    return str(ROOT / "examples" / f"{library}_digits.py")


def is_installed(library: str) -> bool:
    """Whether it can be imported; it is not."""
    return importlib.util.find_spec(library) is not None


@pytest.mark.nightly
@every_library
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpirun), pytest.param(3, marks=needs_mpirun)])
def test_it_reaches_the_accuracy_with_the_same_weights_on_all_ranks(ranks: int, library: str) -> None:
    if not is_installed(library):
        pytest.skip(f"{library} is not installed")
    script, env = script_of(library), {"OMP_NUM_THREADS": "1"}
    job = run_limited([sys.executable, script], env=env) if ranks == 1 else run_job(ranks, ["python", script], env=env)
    assert job.code == 0, job.output
    match = LAST_LINE.fullmatch(job.output.splitlines()[-1])
    assert match is not None, job.output
    assert float(match[1]) >= 0.95
    assert int(match[2]) == ranks


@pytest.mark.nightly
@every_library
def test_without_the_library_the_pip_line_is_named(library: str) -> None:
    if is_installed(library):
        pytest.skip(f"{library} is installed")
    job = run_limited([sys.executable, script_of(library)])
    assert job.code == 1
    assert job.output.splitlines()[-1] == f"{library} is not installed: pip install {library} scikit-learn"
