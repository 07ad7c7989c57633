"""Errors before init() under `mpistrat run`: what Python does when it starts on a rank."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cli import supervisor
from mpistrat.cli.mpirun import LaunchCommand
from mpistrat.cli.rank_command import STARTUP, is_python, report_variables
from mpistrat.cli.supervisor import Interference, launch
from mpistrat.process.launch_env import RUN_REPORTS
from mpistrat.process.launchers import OPEN_MPI
from mpistrat.process.report import ReportReader

ROOT = Path(__file__).parents[2]
RANK_1 = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
REPORTED = "[mpistrat] rank 1 on "
WITHOUT_INIT = "[mpistrat] rank 1 has ended without init()"


def start(code: str, path: str | None = str(ROOT), env: dict[str, str] = RANK_1,
          whole: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run Python as `mpistrat run` does, with this PYTHONPATH of the user."""
    environ = {"PATH": os.environ.get("PATH", os.defpath), **({} if path is None else {"PYTHONPATH": path}), **env}
    environ |= report_variables(["python"], True, environ, whole)
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=100)


def test_an_error_before_init_is_reported() -> None:
    done = start("import os\nx = {}\nx['name']")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(REPORTED)
    assert done.stderr.splitlines()[0].endswith(" fails with exit code 1:")
    assert done.stderr.splitlines()[1:] == ['[mpistrat] rank 1 |   File "<string>", line 3, in <module>',
                                            "[mpistrat] rank 1 > KeyError: 'name'", WITHOUT_INIT]
    done = start("import sys; sys.exit(3)")
    assert done.returncode == 3 and done.stderr.splitlines()[0].endswith(" fails with exit code 3:")
    assert done.stderr.splitlines()[1:] == ["[mpistrat] rank 1 > sys.exit(3), before init()", WITHOUT_INIT]
    done = start("raise ValueError('x')", whole=True)
    assert "Traceback (most recent call last)" in done.stderr and REPORTED in done.stderr


@pytest.mark.parametrize(("code", "says"), [
    ("print(1)", True), ("import sys, types; sys.modules['mpi4py.MPI'] = types.ModuleType('MPI')", False),
    ("import os; os.close(2)", False), ("import os; os._exit(0)", False),
    ("import os; pid = os.fork(); pid and os.waitpid(pid, 0) and os._exit(0)", False),
    ("import os, types; os.times = lambda: types.SimpleNamespace(children_user=1.1)", False)],
    ids=["without MPI", "with MPI", "no stderr", "no end", "a fork", "a wrapper"])
def test_a_rank_that_has_not_called_init_says_so(code: str, says: bool) -> None:
    done = start(code)
    assert done.returncode == 0
    assert done.stderr == (f"{WITHOUT_INIT}\n" if says else "")


@pytest.mark.parametrize("path", [None, str(ROOT), f"{ROOT}{os.pathsep}/extra", ""])
def test_it_leaves_no_trace(path: str | None) -> None:
    done = start("import os, sys; print(repr(os.environ.get('PYTHONPATH')), "
                 f"{STARTUP!r} in sys.path, 'numpy' in sys.modules, 'mpistrat' in sys.modules)", path)
    assert done.stdout == f"{path!r} False False False\n", done.stderr


def test_a_process_that_is_no_rank_keeps_the_path_for_its_ranks() -> None:
    done = start("import os; print(os.environ['PYTHONPATH']); raise ValueError", env={})
    assert done.stdout == f"{STARTUP}{os.pathsep}{ROOT}\n"
    assert done.stderr.startswith("Traceback")


def test_a_forked_process_and_an_interpreter_without_mpistrat_print_what_python_prints() -> None:
    done = start("import os\npid = os.fork()\nif not pid: raise ValueError('in the child')\nos.waitpid(pid, 0)")
    assert done.returncode == 0 and done.stderr.startswith("Traceback") and REPORTED not in done.stderr
    done = start("import sys; sys.modules['mpistrat'] = None; raise ValueError('x')")
    assert done.stderr.startswith("Traceback") and REPORTED not in done.stderr


@pytest.mark.parametrize(("text", "said"), [("print('the user was here')", "the user was here\nNone\n"),
                                            ("raise ImportError('no', name='other')", "None\n")])
def test_a_sitecustomize_of_the_user_runs_too(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(text)
    done = start("import os; print(os.environ.get('OTHER'))", f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stdout) == (0, said)
    assert ("Error in sitecustomize" in done.stderr) == ("raise" in text)


def test_which_variables_are_added() -> None:
    train = ["python3.11", "train.py"]
    assert report_variables(train, True, {}, False) == {RUN_REPORTS: "summary", "PYTHONPATH": STARTUP}
    assert report_variables(train, False, {"PYTHONPATH": "/a"}, True) == {
        RUN_REPORTS: "traceback", "PYTHONPATH": f"{STARTUP}{os.pathsep}/a"}
    # Another host may have a PYTHONPATH of its own.
    assert report_variables(train, False, {}, False) == {RUN_REPORTS: "summary"}
    assert report_variables(["sh", "-c", "x"], True, {}, False) == {RUN_REPORTS: "summary"}
    assert is_python(["/env/bin/python"]) and not is_python(["pythonize"]) and not is_python(["ipython"])


def told(*lines: str) -> ReportReader:
    reader = ReportReader()
    for line in lines:
        assert reader.take(f"[mpistrat] {line}\n".encode()) == b""
    return reader


def test_ranks_wait_in_vain_for_one_that_has_ended_without_init() -> None:
    why_vain = Interference().why_vain
    assert why_vain(told("rank 0 is in init()", "rank 1 is in init()")) == ""
    assert why_vain(told("rank 0 has ended without init()", "rank 1 has ended without init()")) == ""
    # A program that has started the one that calls init().
    assert why_vain(told("rank 0 is in init()", "rank 1 is in init()", "rank 1 has ended without init()")) == ""
    assert why_vain(told("rank 0 is in init()", "rank 2 is in init()", "rank 1 has ended without init()")) == \
        "ranks [1] ended without init(), and ranks [0, 2] waited for them in init()"


IN_INIT = "[mpistrat] rank 0 is in init()"
IN_VAIN = "ranks [1] ended without init(), and ranks [0] waited for them in init()\n"
BOTH_FAIL = "\n".join(f"[mpistrat] rank {rank} {said}" for rank in (1, 0) for said in (
    f"on vm fails with exit code {rank + 2}:", f"> sys.exit({rank + 2})", "has ended without init()"))


@pytest.mark.parametrize(("reports", "ends", "code", "last"), [
    (IN_INIT, "exec sleep 20", 1, IN_VAIN), (IN_INIT, "kill -ABRT $$", 1, IN_VAIN), (IN_INIT, "exit 5", 5, IN_VAIN),
    (IN_INIT, "kill -KILL $$", 137, "mpirun itself was killed"), (BOTH_FAIL, "exec sleep 20", 3, "exit code 3\n"),
    (BOTH_FAIL, "kill -ABRT $$", 3, "exit code 3\n"), (BOTH_FAIL, "exit 1", 3, "exit code 3\n"),
    (BOTH_FAIL, "exit 5", 5, "exit code 5\n"), ("mpirun has ended rank 0", "exec sleep 20", 1, "mpirun has not ended"),
    ("mpirun has ended rank 0", "exit 3", 3, "exit code 3\n")])
def test_a_job_that_fails_before_init_ends_with_the_code_and_the_cause_of_the_rank(
        reports: str, ends: str, code: int, last: str, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(supervisor, "_WITHOUT_INIT_S", 0.2 if "sleep" in ends else 60.0)
    mpirun = f"echo '{reports}\n{WITHOUT_INIT}' >&2; {ends}"
    assert launch(LaunchCommand(("sh", "-c", mpirun)), os.environ, ranks=2).code == code
    assert last in capfd.readouterr().err


@pytest.mark.parametrize(("other", "code"), [("true", 1), ("OMPI_COMM_WORLD_RANK=1 sleep 1", 0), ("env -i sleep 1", 0)])
def test_a_wait_in_init_ends_if_a_rank_is_gone_and_else_is_reported(
        other: str, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("_LOOK_S", "_WITHOUT_INIT_S", "_REPORT_S"):
        monkeypatch.setattr(supervisor, name, 0.2)
    mpirun = f"echo '{IN_INIT}' >&2; export OMPI_COMM_WORLD_LOCAL_SIZE=2; {other} & OMPI_COMM_WORLD_RANK=0 sleep 1"
    assert launch(LaunchCommand(("sh", "-c", mpirun), launcher=OPEN_MPI), os.environ, ranks=2).code == code
    err = capfd.readouterr().err
    assert (IN_VAIN in err) == bool(code) and ": ranks [0] wait in init() for ranks [1], which have not called" in err


SCRIPT = """
import gc, weakref
import mpistrat.keras
class Cyclic: pass
def make():
    found = Cyclic()
    found.itself = found
    return weakref.ref(found)
last = make()
gc.collect()
print(gc.get_freeze_count() > 100_000, last() is None)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("variables", "is_frozen"), [
    ({}, False), ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, True)])
def test_objects_of_libraries_are_frozen_and_those_of_the_script_are_collected(variables: dict[str, str],
                                                                              is_frozen: bool) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX", "PMI_"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env={**environ, **variables}, capture_output=True, text=True,
                          check=True)
    assert done.stdout.split() == [str(is_frozen), "True"]
