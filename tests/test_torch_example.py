"""The example with torch as its user starts it: plain python, and under mpirun. Skipped where torch is missing."""

import importlib.util
import re
import sys

import pytest

from .jobs import ROOT, needs_mpirun, run_job, run_limited

SCRIPT = str(ROOT / "examples" / "torch_digits.py")
LAST_LINE = re.compile(r"test accuracy (\d\.\d{3}), \d+\.\d s, weights [0-9a-f]{64}, the same on all ranks \((\d+)\)")


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpirun), pytest.param(3, marks=needs_mpirun)])
def test_it_reaches_the_accuracy_with_the_same_weights_on_all_ranks(ranks: int) -> None:
    env = {"OMP_NUM_THREADS": "1"}
    job = run_limited([sys.executable, SCRIPT], env=env) if ranks == 1 else run_job(ranks, ["python", SCRIPT], env=env)
    assert job.code == 0, job.output
    match = LAST_LINE.fullmatch(job.output.splitlines()[-1])
    assert match is not None, job.output
    assert float(match[1]) >= 0.95
    assert int(match[2]) == ranks


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_without_torch_the_pip_line_is_named() -> None:
    job = run_limited([sys.executable, SCRIPT])
    assert job.code == 1
    assert job.output.splitlines()[-1] == "torch is not installed: pip install torch 'mpistrat[examples]'"
