"""mpistrat.run before it starts anything: wrong arguments, and how results and failures are read."""

import os
import pickle
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import mpistrat
from mpistrat.cli import function, function_rank
from mpistrat.cli.function import RANK_FILE, RankResult
from mpistrat.core.errors import LaunchError, RunError


@pytest.mark.horovod("run-refused")
@pytest.mark.parametrize(("arguments", "text"), [
    ({"np": 0}, "np must be a number of ranks, at least 1. Received: 0"),
    ({"np": True}, "at least 1"), ({"num_proc": "2"}, "at least 1"),
    ({"np": 2, "num_proc": 3}, "two names of one argument. Received: np=2, num_proc=3"),
    ({"min_np": 1, "max_num_proc": 2}, "does not take max_num_proc, min_np: the number of ranks is fixed"),
    ({"use_gloo": True}, "no Gloo"), ({"hosts": "a:1", "hostfile": "b"}, "hosts or hostfile, not both"),
    ({"hosts": "a:x"}, "is not host:slots"), ({"hostfile": "/nowhere"}, "No such file"),
    ({"mpi_args": "-np 3"}, "'-np 3' is not a list of options for mpirun: mpirun has no option -np=3, or mpistrat "),
    ({"mpi_args": "prog"}, "is not a list of options for mpirun: mpirun has no option prog --"),
    ({"mpi_args": "'"}, "is not a list of options for mpirun: No closing quotation"),
])
def test_wrong_arguments_are_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        mpistrat.run(print, **arguments)


def test_what_is_no_function_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"func must be a function\. Received: 'train.py'"):
        mpistrat.run("train.py")  # type: ignore[arg-type]


@pytest.mark.parametrize("variables", [
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {"PMIX_RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}])
def test_a_rank_cannot_call_it(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="this process is already a rank of a job"):
        mpistrat.run(print, np=2)


def test_the_only_task_of_a_step_of_slurm_can_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "PROCID": "0", "STEP_ID": "0", "STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr(function, "_launched", lambda *_: 3)
    with pytest.raises(RunError, match=r"the job has ended with exit code 3, and ranks \[0, 1\] have returned no"):
        mpistrat.run(print, np=2)


def test_a_directory_that_another_user_may_have_made_is_not_read(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not function_rank.is_seen(tmp_path / "none")
    tmp_path.chmod(0o700)
    (tmp_path / function.CALL).touch()
    assert function_rank.is_seen(tmp_path)
    tmp_path.chmod(0o755)
    assert not function_rank.is_seen(tmp_path)
    tmp_path.chmod(0o700)
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert not function_rank.is_seen(tmp_path)


def test_a_function_that_cannot_be_pickled_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "dumps", Mock(side_effect=pickle.PicklingError("no lambdas")))
    with pytest.raises(LaunchError, match=r"cannot send .* to the ranks: no lambdas\. pip install cloudpickle"):
        mpistrat.run(lambda: None)


@pytest.mark.horovod("run")
def test_harmless_arguments_of_horovod_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(function, "run_function", lambda *arguments: called.append(arguments))
    mpistrat.run(print, ("a",), {"sep": ""}, 2, disable_cache=True, use_mpi=True, verbose=1, mpi_args="--tag-output",
                 network_interfaces="eth0")
    (call, options, executable, start_timeout_s, is_printed), = called
    assert call == (print, ("a",), {"sep": ""})
    assert options == ["-np=2", "--network-interface=eth0", "--mpi-args=--tag-output"]
    assert (executable, start_timeout_s, is_printed) == (sys.executable, 600, True)


def outcomes(directory: Path, *found: RankResult | None) -> Path:
    for rank, outcome in enumerate(found):
        if outcome is not None:
            function.write(directory / RANK_FILE.format(rank), pickle.dumps(outcome))
    return directory


DONE = RankResult(result=pickle.dumps("done"))


def test_results_are_read_in_rank_order(tmp_path: Path) -> None:
    found = [RankResult(result=pickle.dumps(rank)) for rank in range(11)]
    assert function._results(outcomes(tmp_path, *found), 11, 0) == list(range(11))
    assert all(path.suffix != ".part" for path in tmp_path.iterdir())


def test_the_rank_that_failed_by_itself_is_named(tmp_path: Path) -> None:
    consequence = RankResult(error="ShutdownError", is_consequence=True, host="a")
    cause = RankResult(error="Traceback ...\nValueError: x", exception=pickle.dumps(ValueError("x")), host="b")
    with pytest.raises(RunError, match=r"^rank 1 on b .*\n\nTraceback \.\.\.\nValueError: x$") as caught:
        function._results(outcomes(tmp_path, consequence, cause, DONE), 3, 1)
    assert repr(caught.value.__cause__) == "ValueError('x')"


def test_an_exception_that_cannot_be_read_leaves_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Traceback of a stranger") as caught:
        function._results(outcomes(tmp_path, RankResult(error="Traceback of a stranger", exception=b"no pickle")), 1, 1)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(("found", "code", "text"), [
    ((DONE, None, DONE), 0, r"exit code 0, and ranks \[1\] have returned no result"),
    ((None, None), 7, r"exit code 7, and ranks \[0, 1\] have returned no result"),
    ((DONE, DONE), 7, "exit code 7, and all ranks have returned a result"),
    ((RankResult(result=b"no pickle"),), 0, "the result of rank 0 cannot be read here")])
def test_a_job_without_all_results_is_an_error(tmp_path: Path, found: tuple, code: int, text: str) -> None:
    with pytest.raises(RunError, match=text):
        function._results(outcomes(tmp_path, *found), len(found), code)
