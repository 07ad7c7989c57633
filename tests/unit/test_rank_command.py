"""What a shell does on a rank before the command begins."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.cli.rank_command import Stdin, in_shell
from mpistrat.process.report import ReportReader

ENVIRON = {"PATH": "/usr/bin:/bin", "PMI_RANK": "7"}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, env={**ENVIRON, **variables}, stdin=subprocess.DEVNULL,
                          capture_output=True, check=False)


def test_a_command_without_wishes_is_left_alone() -> None:
    assert in_shell(("python", "train.py"), 2) == ("python", "train.py")


def test_a_rank_says_that_it_starts_and_becomes_the_command() -> None:
    done = run(*in_shell(("sh", "-c", 'echo "$1"; exit 3', "sh", "a  b'"), 2, is_announced=True))
    assert (done.returncode, done.stdout) == (3, b"a  b'\n")
    reader = ReportReader()
    assert reader.take(done.stderr) == b"" and list(reader.started) == [7]
    assert reader.started[7][0] == os.uname().nodename
    line = b"a line of another rank[mpistrat] rank 11 starts as process 4711 on node1\n"
    assert reader.take(line) == b"a line of another rank" and reader.started[11] == ("node1", 4711)


def test_the_process_that_a_rank_names_is_that_of_its_command() -> None:
    done = run(*in_shell(("sh", "-c", "echo $$"), 2, is_announced=True))
    reader = ReportReader()
    reader.take(done.stderr)
    assert reader.started[7][1] == int(done.stdout)


@pytest.mark.parametrize(("rank", "offset", "read"), [(0, 0, b"one two"), (0, 4, b"two"), (1, 0, b"")])
def test_rank_0_gets_an_open_file_from_where_it_is_read(rank: int, offset: int, read: bytes, tmp_path: Path) -> None:
    (tmp_path / "a 'b").write_bytes(b"one two")
    with open(tmp_path / "a 'b", "rb") as file:
        path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        stdin = Stdin(path, os.readlink(path), offset)
        command = in_shell(("cat",), 2, stdin=stdin)
        assert run(*command, PMI_RANK=str(rank)).stdout == read
        elsewhere = in_shell(("cat",), 2, stdin=Stdin(path, "/another", offset))  # The process of another host.
        assert run(*elsewhere, PMI_RANK=str(rank)).stdout == b""
        assert file.tell() == 0


def test_stdin_of_this_process() -> None:
    code = "from mpistrat.cli.rank_command import own_stdin; found = own_stdin(); " \
        "print(found and [found.is_empty, found.offset])"

    def said(stdin: int | None) -> str:
        return subprocess.run([sys.executable, "-c", code], stdin=stdin, capture_output=True, text=True,
                              check=True).stdout.strip()

    one, other = socket.socketpair()
    assert said(subprocess.DEVNULL) == "[True, 0]"
    assert said(subprocess.PIPE) == "[False, 0]"
    assert said(one.fileno()) == "None"
    one.close()
    other.close()
    with open(__file__) as file:
        os.lseek(file.fileno(), 7, os.SEEK_SET)
        assert said(file.fileno()) == "[False, 7]"


def test_a_rank_prints_into_files_and_its_report_to_mpirun(tmp_path: Path) -> None:
    command = in_shell(("sh", "-c", "echo out; echo error >&2; echo \"$_MPISTRAT_REPORTS\" >&9"), 100,
                       str(tmp_path / "a b"))
    done = run(*command, _MPISTRAT_REPORTS="summary")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"summary 9\n")
    files = tmp_path / "a b" / "rank.07"
    assert ((files / "stdout").read_text(), (files / "stderr").read_text()) == ("out\n", "error\n")
    assert run(*in_shell(("true",), 2, "/proc/none")).returncode == 2
