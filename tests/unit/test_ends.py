"""How a rank ends the job: what it prints, its exit code, and the limits on MPI_Abort and MPI_Finalize."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpistrat.process import abort
from mpistrat.process.error_text import ErrorText
from mpistrat.process.launch_env import RUN_REPORTS
from mpistrat.transport.mpi.mpi_library import finalize_without_barrier

STUCK = """
import sys, time, types
from mpistrat.process import abort
abort._ABORT_LIMIT_S = 0.5
def stuck(code):
    print("aborts with", code, flush=True)
    time.sleep(600)
world = types.SimpleNamespace(Abort=stuck)
abort.prepare(types.SimpleNamespace(COMM_WORLD=world), 3, "there")
raise ValueError("odd")
"""


def test_a_rank_ends_even_if_mpi_abort_does_not_return() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout == "aborts with 1\n"
    assert "[mpistrat] rank 3 on there ends the job: ValueError: odd\n" in done.stderr
    assert "in stuck" in done.stderr


def test_an_error_of_a_script_ends_the_job_even_if_a_prompt_would_follow(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(STUCK)
    done = subprocess.run([sys.executable, "-i", tmp_path / "script.py"], input="", capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 1
    assert "[mpistrat] rank 3 on there ends the job: ValueError: odd\n" in done.stderr


ENDS = """
import os, sys, time, types
from mpistrat.process import abort
def aborted(code):
    sys.stdout.flush()
    os._exit(code)

abort._wait_s = lambda *_: 0.0
abort.prepare(types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(Abort=aborted)), 1, "there")
"""
REPORTED = """[mpistrat] rank 1 on there fails with exit code 1:
[mpistrat] rank 1 |   File "<string>", line 10, in <module>
[mpistrat] rank 1 > ValueError: one
[mpistrat] rank 1 > two
"""


def end(script: str, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", ENDS + script], capture_output=True, text=True, timeout=100,
                          env={**os.environ, **(env or {})})


def test_an_error_at_the_prompt_of_interactive_python_does_not_end_the_job() -> None:
    script = ENDS + "raise ValueError('typed')\nprint('goes on')\n"
    done = subprocess.run([sys.executable, "-i"], input=script, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done
    assert "ValueError: typed" in done.stderr
    assert "ends the job" not in done.stderr


@pytest.mark.parametrize(("way", "last"), [
    ("", "\n[mpistrat] rank 1 on there ends the job: ValueError: one\ntwo\n"), ("summary", REPORTED),
    ("traceback", REPORTED)])
def test_the_whole_message_comes_last_and_mpistrat_run_asks_for_tracebacks(way: str, last: str) -> None:
    done = end("raise ValueError('one\\ntwo')", {RUN_REPORTS: way} if way else None)
    assert done.returncode == 1
    assert done.stderr.endswith(last)
    assert done.stderr.startswith("Traceback (most recent call last):\n") == (way != "summary")


@pytest.mark.parametrize("script", [
    "import io; sys.stderr = io.TextIOWrapper(os.fdopen(1, 'wb'), write_through=True)",
    "ours = sys.excepthook\nsys.excepthook = lambda *error: (print('Traceback'), ours(*error))"])
def test_what_the_script_has_put_in_place_gets_the_traceback_too(script: str) -> None:
    done = end(f"{script}\nraise ValueError('one\\ntwo')", {RUN_REPORTS: "summary"})
    assert "Traceback" in done.stdout
    assert done.stderr == REPORTED.replace("line 10", f"line {11 + script.count(chr(10))}")


@pytest.mark.parametrize("way", ["", "summary"])
def test_a_hook_that_replaces_ours_is_called_and_the_error_ends_the_job_all_the_same(way: str) -> None:
    # As rich.traceback.install() does. Python waits for the thread before its exit handlers run.
    done = end("""import threading
threading.Thread(target=time.sleep, args=(60,)).start()
ours = sys.excepthook
sys.excepthook = first = lambda *error: print("first", error[1])
assert sys.excepthook is first
sys.excepthook = ours
assert sys.excepthook is ours
sys.excepthook = lambda *error: print("second", error[1])
raise ValueError("odd")
""", {RUN_REPORTS: way} if way else None)
    assert (done.returncode, done.stdout) == (1, "second odd\n")
    assert done.stderr.endswith("[mpistrat] rank 1 > ValueError: odd\n" if way else
                                "[mpistrat] rank 1 on there ends the job: ValueError: odd\n")
    assert "Traceback" not in done.stderr


def test_an_error_that_no_hook_would_get_ends_the_job_too() -> None:
    done = end("""import threading
sys.excepthook = print
threading.Thread(target=lambda: abort.uncaught(ValueError("odd"))).start()
time.sleep(60)
""")
    assert done.returncode == 1
    assert done.stderr == "[mpistrat] rank 1 on there ends the job: ValueError: odd\n"


TERMINATED = r"""
import os, signal, sys, threading, time
from mpistrat.process import abort
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"saves\n"))
abort.hand_on(3, os.environ, lambda: os.write(1, b"interrupted\n"))
child = os.fork()
threading.Thread(target=lambda: [os.kill(os.getpid(), getattr(signal, name)) for name in sys.argv[1:]]).start()
time.sleep(0.1)
if not child:
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("way", "names", "printed", "told"), [
    ({RUN_REPORTS: "summary"}, ["SIGURG"], "saves\n0\n", "[mpistrat] rank 3 hands SIGTERM on\n"),
    ({RUN_REPORTS: "summary"}, ["SIGCONT", "SIGURG"], "interrupted\n0\n", "[mpistrat] rank 3 hands SIGTERM on\n"),
    ({RUN_REPORTS: "summary"}, ["SIGURG", "SIGCONT"], "interrupted\n0\n", "[mpistrat] rank 3 hands SIGTERM on\n"),
    ({RUN_REPORTS: "summary"}, ["SIGCONT"], "0\n", "[mpistrat] rank 3 hands SIGTERM on\n"),
    ({}, ["SIGCONT", "SIGURG"], "0\n", "")])
def test_a_rank_of_mpistrat_run_takes_sigurg_for_sigterm_and_with_sigcont_for_ctrl_c(
        way: dict[str, str], names: list[str], printed: str, told: str) -> None:
    done = subprocess.run([sys.executable, "-c", TERMINATED, *names], capture_output=True, text=True, timeout=100,
                          env={**os.environ, **way})
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, told)


def test_a_rank_that_handles_sigurg_itself_keeps_its_handler() -> None:
    script = "signal.signal(signal.SIGURG, lambda *_: os.write(1, b'own '))\nabort.hand_on"
    done = subprocess.run([sys.executable, "-c", TERMINATED.replace("abort.hand_on", script), "SIGURG"],
                          capture_output=True, text=True, timeout=100, env={**os.environ, RUN_REPORTS: "summary"})
    assert (done.returncode, sorted(done.stdout.split()), done.stderr) == (0, ["0", "own", "own"], "")


def test_programs_that_a_rank_starts_do_not_report() -> None:
    done = end(f"print(os.environ.get({RUN_REPORTS!r})); raise ValueError", {RUN_REPORTS: "summary"})
    assert done.stdout == "None\n"
    assert "fails with exit code 1" in done.stderr


def test_a_rank_that_others_wait_for_ends_the_job_with_the_code_of_sys_exit() -> None:
    # shutdown() calls this at exit, when the engine has ended because this rank has left.
    waiting = "abort.end_job_for_sys_exit('sum: ranks [0] wait for ranks [1]. Give every rank the same.')"
    script = f"import atexit; atexit.register(lambda: {waiting})\n"
    done = end(script + "sys.exit(3)")
    assert done.returncode == 3
    assert done.stderr == ("[mpistrat] rank 1 on there ends the job with exit code 3: sys.exit(3), while other ranks "
                           "wait for this one: sum: ranks [0] wait for ranks [1]\n")
    for well in ("sys.exit(0)", "pass", "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass"):
        done = end(script + well)
        assert (done.returncode, done.stderr) == (0, ""), well


def test_a_sys_exit_that_no_rank_waits_for_is_reported_to_mpistrat_run() -> None:
    done = end("sys.exit(3)", {RUN_REPORTS: "summary"})
    assert (done.returncode, done.stderr) == (
        3, "[mpistrat] rank 1 on there fails with exit code 3:\n[mpistrat] rank 1 > sys.exit(3)\n")
    assert end("sys.exit(0)", {RUN_REPORTS: "summary"}).stderr == ""
    assert end("sys.exit(3)").stderr == ""


@pytest.mark.parametrize("library", [SimpleNamespace(__file__="No such file"), np.linalg._umath_linalg])
def test_a_library_without_a_barrier_in_finalize_is_left_as_it_is(library: Any) -> None:
    assert not finalize_without_barrier(library)


@pytest.mark.parametrize(("code", "is_asked", "waits"), [(1, True, [0.3]), (1, False, [0.0]), (130, True, [0.0])])
def test_ranks_tell_their_last_operations_before_the_end_unless_the_user_has_ended_the_job(
        code: int, is_asked: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    monkeypatch.setattr(abort, "tell_last", lambda: did.append("told") or is_asked)
    monkeypatch.setattr(abort, "time", SimpleNamespace(sleep=did.append))
    monkeypatch.setattr(abort.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    world = SimpleNamespace(Abort=lambda code: did.append(f"aborts with {code}"))
    abort.end_job(SimpleNamespace(COMM_WORLD=world), 1, "there", ErrorText("", "odd"), code)  # type: ignore[arg-type]
    assert did == ["told"] * (code == 1) + [*waits, f"aborts with {code}"]
