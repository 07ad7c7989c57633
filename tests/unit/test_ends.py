"""How a rank ends the job: the line that names the cause, and the limit on MPI_Abort."""

import subprocess
import sys

import pytest

from mpistrat.errors import SettingsError, ShutdownError
from mpistrat.mpi_setup import cause_of

GRAPH = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
mpistrat.errors.ShutdownError: optimizer1: ranks [0] wait for ranks [1].


[[{{node PyFunc}}]] [Op:__inference_multi_step_on_iterator_326]"""


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("one\ntwo"), "ValueError: one"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (ShutdownError("text"), "mpistrat.errors.ShutdownError: text"),
    (SettingsError("first\nsecond"), "mpistrat.errors.SettingsError: first"),
    (RuntimeError(GRAPH), "mpistrat.errors.ShutdownError: optimizer1: ranks [0] wait for ranks [1].")])
def test_the_cause_is_one_line_and_ours_if_there_is_one(error: BaseException, line: str) -> None:
    assert cause_of(type(error), error) == line


STUCK = """
import sys, time, types
from mpistrat import mpi_setup
mpi_setup._ABORT_LIMIT_S = 0.5
def abort(code):
    print("aborts with", code, flush=True)
    time.sleep(600)
world = types.SimpleNamespace(Abort=abort)
mpi_setup.end_job_on_exception(types.SimpleNamespace(COMM_WORLD=world), 3, "there")
raise ValueError("odd")
"""


def test_a_rank_ends_even_if_mpi_abort_does_not_return() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout == "aborts with 1\n"
    assert "[mpistrat] rank 3 on there ends the job: ValueError: odd\n" in done.stderr
    assert "in abort" in done.stderr
