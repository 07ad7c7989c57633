"""The lines with which a rank says why it fails, and how `mpistrat run` reads them among others."""

import os
import subprocess
import sys
import threading

import pytest

from mpistrat.process import report
from mpistrat.process.error_text import ErrorText
from mpistrat.process.launch_env import RUN_REPORTS
from mpistrat.process.report import Report, ReportReader

FRAMES = '  File "/home/user/train.py", line 3, in <module>\n    main()'
ONE = Report(1, "node1", 1, ErrorText(FRAMES, "ValueError: one\n\ntwo"))
OTHER = Report(12, "node2", 130, ErrorText("", "KeyboardInterrupt"))


def lines_of(*reports: Report) -> list[bytes]:
    return [line.encode() for each in reports for line in each.lines()]


def read(lines: list[bytes]) -> tuple[list[Report], list[bytes | None]]:
    reader = ReportReader()
    returned = [reader.take(line) for line in lines]
    return reader.reports, returned


def test_a_report_can_be_read_by_a_person() -> None:
    assert "".join(ONE.lines()) == """\
[mpistrat] rank 1 on node1 fails with exit code 1:
[mpistrat] rank 1 |   File "/home/user/train.py", line 3, in <module>
[mpistrat] rank 1 |     main()
[mpistrat] rank 1 > ValueError: one
[mpistrat] rank 1 > \n[mpistrat] rank 1 > two
"""


def test_the_lines_of_two_ranks_may_mix() -> None:
    first, second = lines_of(ONE), lines_of(OTHER)
    assert read([first[0], second[0], first[1], second[1], *first[2:]]) == ([ONE, OTHER], [b""] * 8)


@pytest.mark.parametrize("before", [b"[1,0]<stderr>: ", b"[1] ", b"a line that has no end yet "])
def test_what_stands_before_a_report_in_its_line_is_returned(before: bytes) -> None:
    reports, returned = read([before + line for line in lines_of(ONE)])
    assert reports == [ONE] and set(returned) == {before}


def test_ranks_that_have_ended_without_init_are_counted() -> None:
    reader = ReportReader()
    assert [reader.take(b"[1,%d]<stderr>: [mpistrat] rank %d has ended without init()\n" % (rank, rank))
            for rank in (3, 12, 3)] == [b"[1,%d]<stderr>: " % rank for rank in (3, 12, 3)]
    assert reader.without_init == {3, 12} and not reader.reports


def test_other_lines_are_not_taken() -> None:
    lines = [b"ValueError\n", b"[mpistrat] rank 1 on node1 ends the job: ValueError\n",
             b"[mpistrat] rank 3 > without a beginning\n", b"\n", b"\xff\xfe\n"]
    assert read(lines) == ([], [None] * len(lines))


@pytest.mark.parametrize("text", [b"has \xff", b"measures {\xff}", b"> \xff", b"on \xff fails with exit code 1:"])
def test_bytes_that_are_no_text_do_not_end_the_reader(text: bytes) -> None:
    reader = ReportReader()
    reader.take(lines_of(ONE)[0])
    assert reader.take(b"[mpistrat] rank 1 " + text + b"\n") == b""


def test_what_a_line_cannot_have_is_escaped() -> None:
    odd = Report(0, "h", 1, ErrorText("", "ValueError: 10%\r20% \udcff"))
    written = [line.encode(errors="backslashreplace") for line in odd.lines()]
    assert read(written)[0][0].text.message == "ValueError: 10%\\r20% \\udcff"


def test_a_very_long_message_is_cut_and_says_so() -> None:
    text = "".join(Report(0, "h", 1, ErrorText("", "x" * 1_000_000)).lines())
    assert len(text) < 101_000
    assert text.endswith("> (and 900000 more characters)\n")


def test_lines_are_written_whole_and_in_blocks_that_a_pipe_takes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[bytes] = []
    monkeypatch.setattr(os, "write", lambda _, data: blocks.append(data) or len(data))
    lines = [f"{n} {'x' * 100}\n" for n in range(100)] + ["y" * 10_000 + "\n"]
    report._write(2, lines)
    assert b"".join(blocks).decode() == "".join(lines)
    assert all(block.endswith(b"\n") and len(block) < 4096 for block in blocks[:-1])


def test_the_latest_operations_that_a_rank_tells_are_kept(capfd: pytest.CaptureFixture[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_mode", report.SUMMARY)
    monkeypatch.setattr(sys, "__stderr__", os.fdopen(os.dup(2), "w"))
    for rank, lines in (1, ["old", "older"]), (0, ["other"]), (1, ["ab+/=", "c"]):
        report.tell_last(rank, lines, {})
    reader = ReportReader()
    assert [reader.take(line.encode()) for line in capfd.readouterr().err.splitlines(keepends=True)] == [b""] * 5
    assert reader.last == {1: ["ab+/=", "c"], 0: ["other"]}


def test_a_block_waits_until_the_block_before_it_was_read() -> None:
    source, sink = os.pipe()
    written = threading.Thread(target=report._write, args=(sink, ["x" * 3000 + "\n"] * 3))
    written.start()
    blocks = []
    while len(blocks) < 3:
        blocks.append(os.read(source, 4096))
    written.join()
    os.close(source)
    os.close(sink)
    assert [len(block) for block in blocks] == [3001] * 3


def test_a_report_goes_to_the_stderr_of_the_process(capfd: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_mode", None)
    monkeypatch.setattr(sys, "__stderr__", os.fdopen(os.dup(2), "w"))
    environ = {RUN_REPORTS: report.SUMMARY}
    report.announce(1, "node1", 1, ONE.text, environ)
    assert environ == {}
    assert capfd.readouterr().err == "".join(ONE.lines())


WRAPPED = "import os; from mpistrat.process import report; report.tell(1, report.IN_INIT, os.environ); " \
    "print(repr(report.mode(os.environ)), report.replaces_traceback(os.environ))"
CLOSES = "import subprocess, sys; subprocess.run(sys.argv[1:], stderr=subprocess.STDOUT, check=True)"


@pytest.mark.parametrize(("wrapper", "reaches", "is_replaced"), [
    ('exec "$@"', True, True), ('"$@"; true', True, True), ('"$@" 2>&1 | cat', True, False),
    (f'{sys.executable} -c "{CLOSES}" "$@"; true', True, False),
    ('exec 2>/dev/null; "$@"; true', False, False)])
def test_a_report_comes_to_the_launcher_through_a_wrapper(wrapper: str, reaches: bool, is_replaced: bool) -> None:
    environ = {**os.environ, RUN_REPORTS: report.SUMMARY, "OMPI_COMM_WORLD_RANK": "1"}
    done = subprocess.run(["sh", "-c", wrapper, "sh", sys.executable, "-c", WRAPPED], env=environ, capture_output=True,
                          text=True, timeout=100, check=True)
    assert done.stderr == "[mpistrat] rank 1 is in init()\n" * reaches
    assert done.stdout == f"{'summary' if reaches else ''!r} {is_replaced}\n"
