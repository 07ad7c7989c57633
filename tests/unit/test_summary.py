"""The last lines of `mpistrat run`: who failed, why, and the exit code."""

import signal

import pytest

from mpistrat.cli.stderr import Ending, Words, summarize
from mpistrat.process.error_text import ErrorText
from mpistrat.process.launchers import MPICH, OPEN_MPI
from mpistrat.process.report import Report

FRAMES = '  File "train.py", line 3, in <module>\n    main()'
END = "the job has ended with exit code"
MORE = " (--traceback prints whole tracebacks)"
SHUTDOWN = "mpistrat.core.errors.ShutdownError: sum: ranks [0] wait for ranks [1]."


def report(rank: int, message: str, host: str = "node1", frames: str = FRAMES, code: int = 1) -> Report:
    return Report(rank, host, code, ErrorText(frames, message))


def words(ending: Ending | None, text: bytes = b"words\n") -> Words:
    return Words(text, ending)


def test_a_failure_is_ranks_and_host_frames_message_and_exit_code() -> None:
    assert summarize(1, [report(1, "ValueError: one\ntwo")], [words(Ending(1, code=1))]) == (b"", [
        f"rank 1 on node1 failed:\n{FRAMES}\nValueError: one\ntwo", f"{END} 1{MORE}"])


def test_a_message_is_printed_once_for_all_ranks_that_share_it() -> None:
    reports = [report(rank, "ValueError: x", f"node{rank // 8}", f"frames of {rank}") for rank in range(63, -1, -1)]
    _, lines = summarize(1, reports, [])
    assert lines == ["ranks 0-63 on 8 hosts failed:\nframes of 0\nValueError: x", f"{END} 1{MORE}"]
    _, lines = summarize(1, [report(r, "x", h) for r, h in ((5, "b"), (0, "a"), (1, "a"), (2, "a"))], [])
    assert lines[0].startswith("ranks 0-2, 5 on a, b failed:\n")


def test_the_first_of_different_messages_is_the_last_and_few_are_printed() -> None:
    _, lines = summarize(1, [report(rank, f"KeyError: {rank}") for rank in (4, 2, 3, 1, 0)], [], can_show_more=False)
    assert lines == ["ranks 0-1 on node1 failed with 2 other messages (--traceback prints them)",
                     *(f"rank {rank} on node1 failed:\n{FRAMES}\nKeyError: {rank}" for rank in (3, 2, 4)), f"{END} 1"]


def test_what_only_follows_from_another_failure_is_left_out() -> None:
    exit_3 = report(1, "sys.exit(3), while other ranks wait for this one: sum", "Node1", frames="", code=3)
    assert summarize(3, [report(0, SHUTDOWN), exit_3], []) == (b"", [
        f"{END} 3. Rank 1 on Node1: sys.exit(3), while other ranks wait for this one: sum"])
    assert summarize(1, [report(0, SHUTDOWN)], [])[1][0].endswith(SHUTDOWN)


@pytest.mark.parametrize(("code", "ending", "reason", "kept"), [
    (3, Ending(1, code=3), ", that of rank 1", b""),
    (1, Ending(1, code=0), ": rank 1 has ended with exit code 0 and without MPI_Finalize, while other ranks waited or "
                           "ran", b""),
    (1, Ending(1, code=256), ": rank 1 has ended with exit code 256", b""),
    (137, Ending(1, "vm", signal=9), ": rank 1 on vm was killed, signal 9 (SIGKILL): by a user (kill -9), or by the "
                                     "kernel for lack of memory (see dmesg)", b"others\nwords\n"),
    (139, Ending(1, "vm", signal=11), ": rank 1 on vm was killed, signal 11 (SIGSEGV): it crashed in compiled code; "
                                      "PYTHONFAULTHANDLER=1 prints where", b"others\nwords\n"),
    (143, Ending(1, "vm", signal=15), ": rank 1 on vm was killed, signal 15 (SIGTERM)", b"others\nwords\n"),
    (1, None, "", b"others\nwords\n")])
def test_without_a_report_mpiruns_words_are_explained(code: int, ending: Ending | None, reason: str,
                                                      kept: bytes) -> None:
    said = [words(None, b"others\n"), words(ending)]
    assert summarize(code, [], said, launcher=OPEN_MPI) == (kept, [f"{END} {code}{reason}"])


def test_an_error_in_mpi_is_shown_where_no_rank_reports() -> None:
    said = [Words(b"Socket closed\n", is_error=True), words(Ending(0, "vm"))]
    text, lines = summarize(14, [], said)
    assert text == b"Socket closed\n"
    assert lines == [f"{END} 14: rank 0 on vm called MPI_Abort. If \"Socket closed\" is above, another rank or its "
                     "host has died"]
    assert summarize(1, [report(1, "x")], said)[0] == b""


def test_a_crash_of_mpirun_is_explained() -> None:
    assert summarize(139, [], [], died_of=11)[1] == [
        f"{END} 139: mpirun itself crashed, signal 11 (SIGSEGV). Were there more ranks than this machine can start "
        "(-np)?"]
    assert summarize(137, [], [], died_of=9)[1] == [
        f"{END} 137: mpirun itself was killed, signal 9 (SIGKILL): by a user (kill -9), or by the kernel for lack of "
        "memory (see dmesg)"]
    assert "(SIGKILL): by the agent of this host, by a user" in summarize(137, [], [], died_of=9,
                                                                           subject="generation 1")[1][0]
    # A script in the place of mpirun ends as a shell would.
    assert "mpirun ended with the code of signal 11 (SIGSEGV), and named no rank" in summarize(139, [], [])[1][0]


def test_mpich_gives_a_signal_as_the_exit_code() -> None:
    assert "or was killed by signal 9 (SIGKILL)" in summarize(9, [], [], launcher=MPICH)[1][0]
    assert summarize(9, [], [], launcher=OPEN_MPI)[1] == [f"{END} 9"]


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "signal 15 (SIGTERM)")])
def test_a_job_that_the_user_has_ended(number: int, how: str) -> None:
    assert summarize(1, [], [], interrupted_by=number)[1] == [f"{END} 1: it was ended by {how}"]


def test_the_signal_that_the_user_has_sent_to_all_ranks_is_no_news() -> None:
    words = Words(b"process rank 0 exited on signal 15", Ending(0, "a", signal=15))
    stopped = Report(0, "a", 130, ErrorText('  File "train.py", line 3', "KeyboardInterrupt"))
    assert summarize(130, [stopped], [], interrupted_by=2)[1] == [f"{END} 130: it was ended by Ctrl-C"]
    assert summarize(143, [], [words], interrupted_by=15) == (b"", [f"{END} 143: it was ended by signal 15 (SIGTERM)"])
    assert summarize(139, [], [Words(b"text", Ending(0, "a", signal=11))], interrupted_by=15)[0] == b"text"


def test_a_job_that_has_succeeded_loses_nothing() -> None:
    assert summarize(0, [], [], without_init=1) == (b"", [])
    assert summarize(0, [report(0, "x")], [words(Ending(0, code=1))]) == (
        b"words\n", [f"rank 0 on node1 failed:\n{FRAMES}\nx"])


def test_a_job_in_which_no_rank_has_called_init_is_told_so() -> None:
    _, lines = summarize(0, [], [], without_init=2)
    assert lines[0].startswith("no rank has called init(): each of 2 processes has run the whole script alone")
    assert not [line for line in summarize(1, [], [], without_init=2)[1] if "init()" in line]
