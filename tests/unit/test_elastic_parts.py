"""The parts of elastic jobs: commits as bytes, lines between processes, options, and where hosts are found."""

import argparse
import secrets
import socket
import threading
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from mpistrat.cli.elastic import HostFinder, limits_of, slurm_counts, tolerant_options
from mpistrat.cli.hostfile import OPEN_MPI
from mpistrat.cli.mpirun import Mpirun
from mpistrat.cli.run import parse
from mpistrat.core.errors import LaunchError
from mpistrat.elastic.commits import CommitId, DamagedCommitError, Packed, read, save
from mpistrat.elastic.job import ElasticJob, job_of
from mpistrat.elastic.line import Line, Listening, Message, connect
from mpistrat.elastic.plan import Limits

VALUE = (CommitId(2, 7), {"weights": [np.arange(1000.0), np.ones((3, 5), np.float16), np.array(4)], "epoch": 3})


def written(value: object) -> bytearray:
    packed = Packed(value)
    memory = bytearray(packed.nbytes)
    packed.write(memoryview(memory))
    return memory


def assert_is_value(found: object) -> None:
    number, state = found  # type: ignore[misc]
    assert number == CommitId(2, 7) and state["epoch"] == 3
    for got, wanted in zip(state["weights"], VALUE[1]["weights"], strict=True):  # type: ignore[index]
        assert got.dtype == wanted.dtype and np.array_equal(got, wanted)


def test_a_commit_is_read_as_it_was_written_also_from_larger_memory() -> None:
    assert_is_value(read(memoryview(written(VALUE) + bytes(100))))


def test_the_arrays_of_a_commit_are_views_of_its_memory() -> None:
    memory = written(VALUE)
    first = read(memoryview(memory))[1]["weights"][0]
    assert first.ctypes.data - np.frombuffer(memory, np.uint8).ctypes.data in range(len(memory))


def test_a_commit_that_is_cut_at_any_byte_or_changed_is_damaged() -> None:
    memory = written(VALUE)
    for length in [*range(0, 200), *range(200, len(memory), 97), len(memory) - 1]:
        with pytest.raises(DamagedCommitError):
            read(memoryview(memory[:length]))
    for place in [0, 17, 40, 100, len(memory) // 2, len(memory) - 1]:
        changed = bytearray(memory)
        changed[place] ^= 1
        with pytest.raises(DamagedCommitError):
            read(memoryview(changed))


def test_a_file_is_complete_or_that_of_the_commit_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "commit"
    save(Packed(VALUE), str(path))

    def full(*words: object) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(Packed((CommitId(2, 8), {})), str(path))
    assert_is_value(read(memoryview(path.read_bytes())))
    assert [each.name for each in tmp_path.iterdir()] == ["commit"]


def test_later_commits_are_greater() -> None:
    assert CommitId(1, 9) < CommitId(2, 1) < CommitId(2, 2)


# -- lines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def listening() -> "tuple[tuple[str, int], bytes, SimpleQueue[Line]]":
    """Where a process listens, its secret, and the lines that it has accepted."""
    secret, lines = secrets.token_bytes(32), SimpleQueue[Line]()
    listener = socket.create_server(("127.0.0.1", 0))
    Listening(listener, secret, lines.put)
    return listener.getsockname()[:2], secret, lines


def test_messages_arrive_in_order_and_the_end_is_noticed(listening) -> None:
    address, secret, lines = listening
    line = connect([("127.0.0.1", 1), address], secret, 5.0)
    other, taken = lines.get(timeout=5), SimpleQueue[Message | None]()
    other.read(lambda _, message: taken.put(message))
    for number in range(100):
        assert line.send(kind="count", number=number)
    assert [taken.get(timeout=5)["number"] for _ in range(100)] == list(range(100))
    line.close()
    line.close()
    assert taken.get(timeout=5) is None


def test_who_does_not_know_the_secret_gets_no_line(listening) -> None:
    address, secret, lines = listening
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        connect([address], b"another secret", 5.0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
        connect([address], secret, 5.0).send(kind="hello")
    assert lines.get(timeout=5).receive() == {"kind": "hello"}
    assert lines.empty()


def test_a_line_that_is_closed_by_the_reader_says_so_to_who_sends(listening) -> None:
    address, secret, lines = listening
    line = connect([address], secret, 5.0)
    lines.get(timeout=5).close()
    ended = threading.Event()
    line.read(lambda _, message: ended.set() if message is None else None)
    assert ended.wait(5)


def test_the_job_travels_in_one_variable() -> None:
    job = ElasticJob("name", "ab" * 32, 3, ("10.0.0.1", "node1"), 4711, "/checkpoints", 10)
    assert job_of(job.variable()) == job and job.key == b"\xab" * 32
    assert job_of({}) is None


# -- options ----------------------------------------------------------------------------------------------------------


def options(line: str) -> argparse.Namespace:
    found, _, _ = parse([*line.split(), "true"])
    found.np = found.np if found.np is not None else found.max_np
    return found


def test_the_options_of_horovodrun_give_the_limits() -> None:
    line = ("--min-np 2 --max-np 8 -np 4 --elastic-timeout 60 --reset-limit 5 --blacklist-cooldown-range 10 100 "
            "--restart-failed")
    assert limits_of(options(line)) == Limits(2, 8, 60.0, 5, (10.0, 100.0), True)
    assert limits_of(options("--elastic -np 4")) == Limits(1, 4)
    assert options("--elastic=restart -np 4").elastic == "restart"


@pytest.mark.parametrize(("line", "text"), [
    ("--elastic --min-np 5 -np 4", "--min-np 5 must be from 1 to"),
    ("--elastic --min-np 0 -np 4", "--min-np 0 must be"),
    ("--elastic --min-np 2", "how many ranks"),
    ("--elastic -np 2 --reset-limit -1", "--reset-limit -1 must be at least"),
    ("--elastic -np 2 --blacklist-cooldown-range 9 3", "the lower one first"),
    ("--elastic -np 2 --elastic-checkpoint-every 0", "--elastic-checkpoint-every 0 must be at least 1"),
])
def test_options_that_cannot_be_are_errors(line: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        limits_of(options(line))


TOLERANT = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")


@pytest.mark.parametrize(("version", "hosts", "found"), [
    ("5.0.11", 1, TOLERANT), ("5.0.11", 2, ()), ("5.0.9", 1, ()), ("4.1.4", 1, ()),
    ("5.1.0rc1", 1, TOLERANT),
])
def test_fault_tolerance_is_asked_for_where_it_works(version: str, hosts: int, found: tuple[str, ...]) -> None:
    assert tolerant_options(Mpirun("mpirun", OPEN_MPI, version), hosts) == found
    assert tolerant_options(Mpirun("mpirun", "MPICH", version), hosts) == ()


def test_a_hostfile_is_read_again_and_a_bad_one_changes_nothing(tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "hosts", []
    monkeypatch.setattr("mpistrat.cli.elastic._say", said.append)
    path.write_text("node1 slots=4\nnode2 slots=2\n")
    find = HostFinder(options(f"--elastic -np 6 --hostfile {path}"))
    assert find() == {"node1": 4, "node2": 2}
    path.write_text("node1 slots=4\n")
    assert find() == {"node1": 4}
    path.write_text("node1 slots=many\n")
    assert find() is None and find() is None
    assert len(said) == 1 and "the hosts stay as they are" in said[0]
    path.unlink()
    assert find() is None and "No such file" in said[1]
    with pytest.raises(LaunchError, match="No such file"):
        HostFinder(options(f"--elastic -np 6 --hostfile {path}"))


def test_a_program_names_the_hosts(tmp_path: Path) -> None:
    path = tmp_path / "find"
    path.write_text("#!/bin/sh\necho node1:4; echo node2\n")
    path.chmod(0o755)
    find = HostFinder(options(f"--max-np 8 --slots-per-host 3 --host-discovery-script {path}"))
    assert find() == {"node1": 4, "node2": 3}
    path.write_text("#!/bin/sh\n")
    assert find() == {}
    path.write_text("#!/bin/sh\necho it is broken >&2; exit 7\n")
    assert find() is None and "exit code 7: it is broken" in find.problem


def test_slurm_says_how_many_tasks_each_node_has() -> None:
    assert slurm_counts("4(x2),3") == [4, 4, 3] and slurm_counts("2") == [2]
