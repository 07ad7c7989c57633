"""How a rank ends the job: the line that names the cause, and the limits on MPI_Abort and MPI_Finalize."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.api.abort import cause_of
from mpistrat.core.errors import SettingsError, ShutdownError
from mpistrat.transport.mpi.library import finalize_without_barrier

GRAPH = """Graph execution error:

Detected at node PyFunc defined at (most recent call last):
mpistrat.core.errors.ShutdownError: optimizer1: ranks [0] wait for ranks [1].


[[{{node PyFunc}}]] [Op:__inference_multi_step_on_iterator_326]"""


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("one\ntwo"), "ValueError: one"),
    (KeyboardInterrupt(), "KeyboardInterrupt"),
    (ShutdownError("text"), "mpistrat.core.errors.ShutdownError: text"),
    (SettingsError("first\nsecond"), "mpistrat.core.errors.SettingsError: first"),
    (RuntimeError(GRAPH), "mpistrat.core.errors.ShutdownError: optimizer1: ranks [0] wait for ranks [1].")])
def test_the_cause_is_one_line_and_ours_if_there_is_one(error: BaseException, line: str) -> None:
    assert cause_of(type(error), error) == line


STUCK = """
import sys, time, types
from mpistrat.api import abort
abort._ABORT_LIMIT_S = 0.5
def stuck(code):
    print("aborts with", code, flush=True)
    time.sleep(600)
world = types.SimpleNamespace(Abort=stuck)
abort.end_job_on_exception(types.SimpleNamespace(COMM_WORLD=world), 3, "there")
raise ValueError("odd")
"""


def test_a_rank_ends_even_if_mpi_abort_does_not_return() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout == "aborts with 1\n"
    assert "[mpistrat] rank 3 on there ends the job: ValueError: odd\n" in done.stderr
    assert "in stuck" in done.stderr


PROMPT = """
import types
from mpistrat.api import abort
world = types.SimpleNamespace(Abort=lambda code: print("aborts with", code))
abort.end_job_on_exception(types.SimpleNamespace(COMM_WORLD=world), 3, "there")
raise ValueError("typed")
print("goes on")
"""


def test_an_error_at_the_prompt_of_interactive_python_does_not_end_the_job() -> None:
    done = subprocess.run([sys.executable, "-i"], input=PROMPT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done
    assert "ValueError: typed" in done.stderr
    assert "ends the job" not in done.stderr


def test_an_error_of_a_script_ends_the_job_even_if_a_prompt_would_follow(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STUCK)
    done = subprocess.run([sys.executable, "-i", tmp_path / "script.py"], input="", capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 1
    assert "[mpistrat] rank 3 on there ends the job: ValueError: odd\n" in done.stderr


@pytest.mark.parametrize("library", [SimpleNamespace(__file__="No such file"), np.linalg._umath_linalg])
def test_a_library_without_a_barrier_in_finalize_is_left_as_it_is(library: Any) -> None:
    assert not finalize_without_barrier(library)
