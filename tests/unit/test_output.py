"""What `mpistrat run` shows of mpirun's stderr, and what it keeps: reports, mpirun's words, repeated log lines."""

import os

import pytest

from mpistrat.cli.stderr import BLOCK_S, PARTIAL_S, Ending, Output, understand
from mpistrat.cli.supervisor import Forwarder
from mpistrat.process.error_text import ErrorText
from mpistrat.process.report import Report

RULE = b"-" * 74 + b"\n"
KILLED_5 = RULE + b"""prterun noticed that process rank 1 with PID 25997 on node vm exited on
signal 9 (Killed).
""" + RULE
KILLED_4 = RULE + b"""mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).
""" + RULE
CODE_5 = RULE + b"""prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-26062@1,1]
   Exit code:    3
""" + RULE
CODE_4 = RULE + b"""mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[5416,1],1]
  Exit code:    3
""" + RULE
ABORT_5 = RULE + b"""MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[49514,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
""" + RULE
ABORT_4 = RULE + b"""MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
with errorcode 1.

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
""" + RULE
ABORT_MPICH = b"Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 1\n"
OTHERS_5 = RULE + b"""prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
""" + RULE
OTHERS_4 = RULE + b"""Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
""" + RULE
MORE_4 = (b"[vm:00211] 3 more processes have sent help message help-mpi-api.txt / mpi-abort\n",
          b'[vm:00211] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n')
UNREACHABLE_5 = (b"[vm:09647] PMIX ERROR: PMIX_ERR_UNREACH in file "
                 b"/openmpi-5.0.11/3rd-party/openpmix/src/server/pmix_server.c at line 3146\n")
CRASH_5 = b"prterun: pthread_mutex_lock.c:450: __pthread_mutex_lock_full: Assertion `e != ESRCH || !robust' failed.\n"
ERROR_5 = [b"[vm:00000] *** " + text for text in (
    b"An error occurred in Socket closed\n", b"reported by process [2741960705,0]\n", b"on a NULL communicator\n",
    b"Unknown error\n", b"MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n",
    b"   and MPI will try to terminate your MPI job as well)\n")]
SLOTS = RULE + b"There are not enough slots available in the system\n" + RULE
REPORT = Report(1, "node1", 1, ErrorText("", "mpistrat.core.errors.ShutdownError: sum: ranks [0] wait"))
REPORT_LINES = "".join(REPORT.lines()).encode()


def fed(output: Output, data: bytes, now: float = 0.0) -> bytes:
    return output.feed(data, now) + output.due(now)


def shown(data: bytes, **options: int) -> bytes:
    output = Output(**options)
    return fed(output, data) + output.end()


# -- mpirun's words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "ending"), [
    (KILLED_5, Ending(1, "vm", signal=9)), (KILLED_4, Ending(1, "vm", signal=9)), (CODE_5, Ending(1, code=3)),
    (CODE_4, Ending(1, code=3)), (ABORT_5, Ending(1, code=1)), (ABORT_4, Ending(1, code=1)),
    (ABORT_MPICH, Ending(1, code=1)), (OTHERS_5, Ending(1, "vm")), (OTHERS_4, None), (UNREACHABLE_5, None),
    (OTHERS_5.replace(b'calling\n"abort"', b"exiting\nimproperly"), Ending(1, "vm", code=0)), (CRASH_5, None),
    *((line, None) for line in (*ERROR_5, *MORE_4))])
def test_what_mpirun_says_of_an_end_is_understood_and_kept(text: bytes, ending: Ending | None) -> None:
    words = understand(text)
    assert words is not None and words.ending == ending
    output = Output()
    assert fed(output, b"before\n" + text + b"after\n") + output.end() == b"before\nafter\n"
    assert output.words == [words]
    assert shown(text, is_all=True) == text


def test_other_texts_of_mpirun_are_shown() -> None:
    assert shown(b"a\n" + SLOTS + b"b\n") == b"a\n" + SLOTS + b"b\n"
    assert shown(SLOTS + KILLED_5) == SLOTS
    segfault = b"[vm:00211] *** Process received signal ***\n[vm:00211] Signal: Segmentation fault (11)\n"
    assert shown(segfault) == segfault
    assert shown(RULE + b"a table\n" + KILLED_5 + b"b\n") == RULE + b"a table\nb\n"


def test_a_text_that_does_not_end_is_shown_after_a_moment() -> None:
    output = Output()
    assert fed(output, RULE + b"a table\n") == b""
    assert output.next_s(0.0) == BLOCK_S
    assert output.due(BLOCK_S) == RULE + b"a table\n"
    lines = b"".join(b"%d\n" % n for n in range(100))
    assert fed(output, RULE + lines) == RULE + lines


def test_the_null_character_after_the_last_words_of_open_mpi_is_left_out() -> None:
    output = Output()
    assert fed(output, OTHERS_5 + b"\0") + output.due(PARTIAL_S) + output.end() == b""
    output = Output()
    assert fed(output, OTHERS_5 + b"a line of a rank\n" + b"\0") + output.end() == b"a line of a rank\n"
    assert output.is_at_line_start
    assert fed(output, b"\0a line of a rank\n") + output.end() == b"a line of a rank\n"
    assert shown(b"a\0b\n\0") == b"a\0b\n\0"


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_all_else_passes_unchanged_however_it_is_cut(size: int) -> None:
    data = bytes(range(256)) * 3 + b"\n\n\r\n" + b"line\n" * 9 + b"\xff" * 5000 + b"\n\x1b[0mno end"
    output = Output()
    pieces = [data[i:i + size] for i in range(0, len(data), size)]
    assert b"".join(fed(output, piece) for piece in pieces) + output.end() == data


def test_a_line_without_an_end_appears_after_a_moment_and_goes_on() -> None:
    output = Output()
    assert fed(output, b"10%") == b""
    assert output.next_s(0.0) == PARTIAL_S
    assert output.due(PARTIAL_S) == b"10%" and not output.is_at_line_start
    assert fed(output, b"\r20%", 1.0) == b"" and output.due(1.0 + PARTIAL_S) == b"\r20%"
    assert fed(output, b" I0000 00:00:17.1 1 port.cc:1] x\n", 2.0) == b" I0000 00:00:17.1 1 port.cc:1] x\n"
    assert output.is_at_line_start and output.next_s(2.0) is None
    # A bar that moves all the time.
    assert b"".join(fed(output, b"\r%d%%" % n, 3.0 + 0.4 * n * PARTIAL_S) for n in range(5)) == b"\r0%\r1%\r2%\r3%"


def test_a_report_is_kept_even_behind_a_line_without_an_end() -> None:
    output = Output()
    assert fed(output, b"10%" + REPORT_LINES) == b"10%\n"
    assert fed(output, b"20%") + output.due(PARTIAL_S) == b"20%"
    assert fed(output, REPORT_LINES, 1.0) == b""
    assert output.told.reports == [REPORT] * 2
    assert shown(b"[1,1]<stderr>: " + REPORT_LINES.replace(b"\n", b"\n[1,1]<stderr>: ", 1)) == b""
    assert shown(REPORT_LINES, is_all=True) == b""


def test_a_forwarder_leaves_no_descriptor_behind(capfd: pytest.CaptureFixture[str]) -> None:
    """An elastic job has one for each generation."""
    before = set(os.listdir("/proc/self/fd"))
    source, sink = os.pipe()
    forwarder = Forwarder(source, Output())
    os.write(sink, b"of mpirun\n")
    os.close(sink)
    forwarder.end(lambda: b"last\n")
    assert forwarder.join(30.0)
    assert capfd.readouterr().err == "of mpirun\nlast\n"
    assert set(os.listdir("/proc/self/fd")) <= before


# -- TensorFlow's log lines and Python's warnings ---------------------------------------------------------------------

NEW = b"%s0000 00:00:1795526973.34%d   %d port.cc:153] oneDNN custom operations are on.\n"
OLD = b"2024-01-31 09:30:00.12345%d: %s tensorflow/core/util/port.cc:153] oneDNN custom operations are on.\n"
HEADER = b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
FLAGS = b"To enable the following instructions: AVX2 FMA, in other operations, rebuild TensorFlow.\n"


@pytest.mark.parametrize("lines", [
    [NEW % (b"E", 1, 11), NEW % (b"E", 2, 12)], [OLD % (1, b"I"), OLD % (2, b"I")], [HEADER, HEADER], [FLAGS, FLAGS],
    [b"/lib/epoch.py:74: UserWarning: x\n  y = f(\n"] * 2])
def test_a_log_line_and_a_warning_are_shown_once(lines: list[bytes]) -> None:
    assert shown(b"".join(lines)) == lines[0]
    assert shown(b"".join(lines), is_all=True) == b"".join(lines)


def test_lines_that_differ_are_all_shown() -> None:
    data = (NEW % (b"I", 1, 1) + NEW % (b"W", 1, 1) + OLD % (1, b"I")
            + b"I0131 09:30:00.123456 140 train.py:20] step\n" * 2
            + b"/lib/a.py:7: UserWarning: x\n  a\n/lib/a.py:7: UserWarning: y\n  a\n" + b"  a\n" * 2)
    assert shown(data) == data


def test_less_severe_lines_than_the_level_are_left_out() -> None:
    info, error = HEADER + FLAGS + NEW % (b"I", 1, 1) + OLD % (1, b"I"), NEW % (b"E", 1, 1)
    assert shown(info + error, least_severity=1) == error
    assert shown(error, least_severity=3) == b""


CU_INIT = (b"E0000 00:00:1795526973.34%d   11 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: "
           b"Failed call to cuInit: UNKNOWN ERROR (303)\n")


def test_that_there_is_no_driver_is_left_out_where_it_is_known() -> None:
    both = CU_INIT % 1 + CU_INIT % 2
    assert shown(both) == CU_INIT % 1
    assert shown(both, has_driver=False) == b""
    assert shown(both, has_driver=False, is_all=True) == both


USAGE = b"""usage: train.py [-h] [--epochs EPOCHS]
                [--rate RATE]
train.py: error: argument --epochs: invalid int value: 'x'
"""


def test_errors_before_the_script_begins_are_shown_once() -> None:
    no_file = b"/env/bin/python3: can't open file '/home/me/nofile.py': [Errno 2] No such file or directory\n"
    assert shown(no_file * 3) == no_file
    assert shown(USAGE * 2) == USAGE
    assert shown(b"".join(line * 2 for line in USAGE.splitlines(keepends=True))) == USAGE
    assert shown(USAGE + USAGE.replace(b"'x'", b"'y'")).endswith(b"'x'\n" + USAGE.splitlines()[-1][:-3] + b"'y'\n")
    assert shown(b"train.py: error: x\n" * 2) == b"train.py: error: x\n" * 2
    assert shown(b"mpistrat bench: no\n" * 2 + b"mpistrat: x\n" * 2) == b"mpistrat bench: no\n" + b"mpistrat: x\n" * 2


@pytest.mark.parametrize("tag", [b"[1,1]<stderr>: ", b"[1,1]<stderr>:", b"[1] "])
def test_words_of_mpi_are_kept_behind_the_tags_of_ranks_too(tag: bytes) -> None:
    output = Output()
    tagged = b"".join(tag + line for line in (ABORT_5 + b"\0\n").splitlines(keepends=True))
    assert output.feed(tagged + tag + b"a line\n", 0.0) + output.end() == tag + b"a line\n"
    assert [words.ending for words in output.words] == [Ending(1, code=1)]
