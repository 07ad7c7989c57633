"""The parts of elastic jobs: commits as bytes, a rank that hands them over, options, and where hosts are found."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpistrat
from mpistrat.api import elastic as states
from mpistrat.api import runtime
from mpistrat.cli import elastic_run
from mpistrat.cli.elastic_run import HostFinder, _Control, is_asked_for, limits_of, slurm_counts, tolerant_options
from mpistrat.cli.mpirun import LaunchCommand, Mpirun
from mpistrat.cli.run import parse, plan
from mpistrat.cli.supervisor import Interference, Outcome, launch
from mpistrat.core.errors import ElasticError, EngineError, LaunchError
from mpistrat.elastic import member, service
from mpistrat.elastic.agent import socket_name
from mpistrat.elastic.commits import CommitId, DamagedCommitError, Packed, load, read, save
from mpistrat.elastic.elastic_job import ElasticJob, job_of
from mpistrat.elastic.service import addresses_towards
from mpistrat.elastic.supervisor_plan import Limits
from mpistrat.process.launchers import MPICH, OPEN_MPI
from mpistrat.trace import last

from ..support.jobs import wait_until

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
    # The first 32 bytes are the header.
    for place, bit in [*((place, bit) for place in range(32) for bit in range(8)), (40, 0), (100, 0),
                       (len(memory) // 2, 0), (len(memory) - 1, 0)]:
        changed = bytearray(memory)
        changed[place] ^= 1 << bit
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


HOLDS = """
import pathlib, sys
from mpistrat.elastic.commits import claim
claim(pathlib.Path(sys.argv[1]))
print(1, flush=True)
sys.stdin.read()
"""


def test_one_job_at_a_time_saves_its_commits_in_a_directory(tmp_path: Path) -> None:
    """Also after a job that was killed, and left a part of a commit."""
    directory = tmp_path / "saved"
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(directory)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"1\n"
            asked = options(f"-np 2 --elastic-checkpoint {directory}")
            with pytest.raises(LaunchError, match=rf"another job saves its commits .* \(process {other.pid} on "
                                                  r"\S+\)\. Wait until that job has ended, or name another"):
                elastic_run.run(asked, lambda *_: pytest.fail("it was started"))
        finally:
            other.kill()
    save(Packed(VALUE), str(directory / "commit.mpistrat"))
    (directory / "commit.mpistrat.4711.tmp").write_bytes(b"mpistrat commit")
    for _ in range(2):  # The first job gives the lock back.
        with elastic_run._directory(asked) as found:
            assert found == str(directory)
            assert sorted(each.name for each in directory.iterdir()) == ["commit.mpistrat", "lock"]


def test_a_directory_without_locks_is_used_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""
    def no_lock(descriptor: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    said: list[str] = []
    monkeypatch.setattr("fcntl.flock", no_lock)
    monkeypatch.setattr(elastic_run, "_say", said.append)
    with elastic_run._directory(options(f"-np 2 --elastic-checkpoint {tmp_path / 'saved'}")) as found:
        assert found == str(tmp_path / "saved")
    assert [each.endswith("cannot be detected (Function not implemented)") for each in said] == [True]


class Own:
    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


PLAIN = {
    "numbers": [0, -1, 2**63, 2**64, -2**127, 10**400, True, None, 0.5, -0.0, float("inf"), 1 + 2j],
    "texts": ["", "ä", "\ud800", b"", b"\0\xff"],
    "containers": [(), (1, (2, [3])), {1, 2}, frozenset("a"), {1: "a", (1, 2): "b", None: {}, 2.5: []}],
    "scalars": [np.float32(1.5), np.float64(0.1), np.int8(-3), np.bool_(True), np.datetime64("2020-01-01")],
    "arrays": [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(9)[::2],
               np.zeros((0, 3), np.int16), np.array(4), np.array([True]), np.array(["a", "bc"]), np.array([b"a"]),
               np.arange(3).astype(">i4"), np.array([1, 2], ml_dtypes.bfloat16),
               np.array([1], ml_dtypes.float8_e4m3fn)],
    "id": CommitId(3, 4)}


def test_what_is_plain_needs_no_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpistrat.elastic.commits.pickle", None)
    found = read(memoryview(written(PLAIN)))
    assert repr(found) == repr(PLAIN)  # which names types and dtypes
    assert found["arrays"][1].flags.f_contiguous


def test_objects_of_the_script_are_pickled() -> None:
    own = {"own": [Own((1, 2))], "ordered": OrderedDict(b=1, a=2), "objects": np.array([None, 1], object),
           "structure": np.zeros(2, "i4,f8"), "masked": np.ma.masked_array([1, 2], [True, False])}
    found = read(memoryview(written(own)))
    assert found["own"] == own["own"] and list(found["ordered"].items()) == [("b", 1), ("a", 2)]
    assert type(found["ordered"]) is OrderedDict and type(found["masked"]) is np.ma.MaskedArray
    assert found["objects"].tolist() == [None, 1] and found["structure"].dtype == own["structure"].dtype
    round_: list[Any] = [np.arange(3)]
    round_.append(round_)
    found = read(memoryview(written(round_)))
    assert found[1] is found and found[0].tolist() == [0, 1, 2]


def test_a_file_and_its_directory_are_this_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "saved" / "commit"
    save(Packed(VALUE), str(path))
    assert [path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777] == [0o600, 0o700]
    assert_is_value(load(str(path)))
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    assert_is_value(load(str(tmp_path / "link" / "commit")))


FOREIGN: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "others can write to the directory": lambda path, patch: path.parent.chmod(0o1777),
    "others can write to the file": lambda path, patch: path.chmod(0o622),
    "it is a link to a file": lambda path, patch: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "another user owns it": lambda path, patch: patch.setattr(
        os, "fstat", lambda file, found=os.fstat: SimpleNamespace(st_uid=found(file).st_uid + 1, st_mode=0o100600)),
    "another user owns the directory": lambda path, patch: patch.setattr(
        os, "geteuid", lambda found=os.geteuid: found() + 1)}


@pytest.mark.parametrize("way", FOREIGN)
def test_a_file_of_another_user_is_not_read(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved" / "commit"
    save(Packed(Own(1)), str(path))
    monkeypatch.setattr("mpistrat.elastic.commits.read", lambda _: pytest.fail("it was read"))
    FOREIGN[way](path, monkeypatch)
    with pytest.raises(OSError, match=(
            r"belongs to user \d+|gives access to other users \(mode 1?\d{3}\)|Too many levels")):
        load(str(path))
    if "directory" in way:
        with pytest.raises(PermissionError):
            save(Packed(Own(1)), str(path))


def test_the_job_travels_in_one_variable() -> None:
    job = ElasticJob("name", "ab" * 32, 3, ("10.0.0.1", "node1"), 4711, "/checkpoints", 10, (2, 132))
    assert job_of(job.variable()) == job and job.key == b"\xab" * 32
    assert job_of({}) is None


# -- a rank ------------------------------------------------------------------------------------------------------------


class LineToAgent:
    """Answers as an agent that has one memory file. It ends when it gets a message of the kind `ends_at`."""

    def __init__(self, path: Path, ends_at: str = ""):
        self._path, self._ends_at = path, ends_at
        self.got: list[dict[str, Any]] = []
        path.touch()

    def read(self, take: Callable[[Any, dict[str, Any] | None], None]) -> None:
        self._take = take

    def send(self, **message: Any) -> bool:
        self.got.append(message)
        answers = {"hello": {"kind": "welcome", "newest": None}, "commit": {"kind": "there", "path": str(self._path)},
                   "written": {"kind": "kept", "newest": None}}
        if message["kind"] == self._ends_at:
            self._take(self, None)
            return False
        if message["kind"] in answers:
            self._take(self, answers[message["kind"]])
        return True


@pytest.fixture
def agents(tmp_path: Path) -> list[LineToAgent]:
    """The agents that the rank finds one after the other. The first one has the file `tmp_path / "memory"`."""
    return [LineToAgent(tmp_path / "memory")]


@pytest.fixture
def rank(agents: list[LineToAgent], monkeypatch: pytest.MonkeyPatch) -> Iterator[member.Member]:
    """A rank of an elastic job, which does nothing at its end."""
    found_agents = iter(agents)
    monkeypatch.setattr(member, "connect_to_agent", lambda job: next(found_agents))
    monkeypatch.setattr(member, "agent_process", lambda job: None)
    monkeypatch.setattr(member.AgentConnection, "_watch", lambda self: None)
    monkeypatch.setattr(member, "exit_code", argparse.Namespace(note=lambda: None, final=lambda: None))
    monkeypatch.setattr(member, "atexit", argparse.Namespace(register=lambda function: None))
    monkeypatch.setattr(member.Member, "_watch_for_preemption", lambda self: None)
    found = member.Member(ElasticJob("name", "ab" * 32, 2, (), 4711), 0)
    yield found
    # The thread that writes waits for ever. The tests of stacks would see it in the queue of a test.
    found._pending.put(lambda: setattr(found, "_pending", SimpleQueue()))


def test_a_commit_is_waited_for_when_a_preemption_is_told_as_it_begins(rank: member.Member, tmp_path: Path) -> None:
    is_told, is_idle = threading.Event(), threading.Event()

    class Pending(SimpleQueue[Callable[[], object]]):
        def put(self, *task: Any) -> None:
            is_told.set()
            assert is_idle.wait(10)
            super().put(*task)

        def get(self, *how: Any) -> Callable[[], object]:
            is_idle.set()
            return super().get(*how)

    rank._pending.put(is_told.wait)  # in place of what the handler of SIGUSR1 does
    rank._pending = Pending()

    def snapshot() -> dict[str, int]:
        time.sleep(0.2)
        return {"epoch": 3}

    rank.commit(7, snapshot, "", is_writer=True, is_saved=False)
    rank.finish()
    assert read(memoryview((tmp_path / "memory").read_bytes())) == (CommitId(2, 7), {"epoch": 3})


def test_a_commit_that_cannot_be_written_is_an_error_of_the_next_one(rank: member.Member) -> None:
    rank.commit(1, lambda: threading.Lock(), "", is_writer=True, is_saved=False)
    with pytest.raises(ElasticError, match="commit 1 cannot be written: cannot pickle"):
        rank.commit(2, dict, "", is_writer=True, is_saved=False)
    rank.commit(3, dict, "", is_writer=True, is_saved=False)
    rank.finish()


def test_a_late_answer_is_not_that_to_the_next_question(rank: member.Member, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[dict[str, Any]] = []
    line = rank._agent._connection
    answer = line.send
    monkeypatch.setattr(member, "_AGENT_LIMIT_S", 0.05)
    monkeypatch.setattr(line, "send", lambda **question: questions.append(question))
    rank.commit(1, dict, "", is_writer=True, is_saved=False)
    with pytest.raises(ElasticError, match="commit 1 cannot be written: the agent of this host has not answered"):
        rank.finish()
    monkeypatch.setattr(member, "_AGENT_LIMIT_S", 10.0)
    monkeypatch.setattr(line, "send", answer)
    answer(**questions[0])
    rank.commit(2, dict, "", is_writer=True, is_saved=False)
    rank.finish()
    assert rank._welcome["kind"] == "kept"


def kinds(agent: LineToAgent) -> list[str]:
    return [message["kind"] for message in agent.got]


@pytest.mark.parametrize("is_writer", [True, False])
def test_another_agent_gets_the_last_commit_from_the_ranks_that_hold_it(
        agents: list[LineToAgent], rank: member.Member, tmp_path: Path, is_writer: bool) -> None:
    agents.append(LineToAgent(tmp_path / "other"))
    rank.connected()
    rank.rename(0, 2)
    rank.commit(7, lambda: {"epoch": 3}, "epoch 3", is_writer=is_writer, is_saved=False)
    rank.finish()
    agents[0]._take(agents[0], None)
    wait_until(lambda: "written" in kinds(agents[1]), 10)
    assert kinds(agents[1]) == ["hello", "renamed", "commit", "written"]
    assert agents[1].got[0]["connected"] and agents[1].got[1]["size"] == 2
    assert agents[1].got[2]["commit"] == [2, 7] and agents[1].got[2]["is_copy"]
    assert read(memoryview((tmp_path / "other").read_bytes())) == (CommitId(2, 7), {"epoch": 3})


def test_another_agent_hears_how_a_rank_ends(agents: list[LineToAgent], rank: member.Member, tmp_path: Path) -> None:
    agents.append(LineToAgent(tmp_path / "other"))
    agents[0]._ends_at = "ended"
    rank._say_end()
    assert kinds(agents[1]) == ["hello", "ended"]


@pytest.mark.parametrize("ends_at", ["commit", "written"])
def test_a_commit_that_is_under_way_when_the_agent_ends_goes_to_another_one(
        agents: list[LineToAgent], rank: member.Member, tmp_path: Path, ends_at: str) -> None:
    agents.append(LineToAgent(tmp_path / "other"))
    rank.hold(CommitId(1, 5), dict, "", is_writer=False)
    agents[0]._ends_at = ends_at
    rank.commit(1, lambda: {"epoch": 4}, "", is_writer=True, is_saved=False)
    rank.finish()
    assert [message["commit"] for message in agents[1].got if message["kind"] == "commit"] == [[1, 5], [2, 1]]
    assert read(memoryview((tmp_path / "other").read_bytes())) == (CommitId(2, 1), {"epoch": 4})


@pytest.mark.parametrize(("known", "kept", "saved", "said"), [
    (None, None, None, ""),
    (CommitId(1, 132), CommitId(1, 132), None, ""),
    (CommitId(1, 132), None, None, "COMMIT 132 OF GENERATION 1 IS LOST; TRAINING BEGINS ANEW"),
    (CommitId(1, 132), CommitId(1, 131), None,
     "COMMIT 132 OF GENERATION 1 IS LOST; TRAINING BEGINS FROM COMMIT 131 OF GENERATION 1"),
    (CommitId(1, 132), None, CommitId(1, 132), ""),
    # The file may be of an earlier job, which has counted its generations too.
    (CommitId(1, 132), None, CommitId(2, 5),
     "COMMIT 132 OF GENERATION 1 IS LOST; TRAINING BEGINS FROM COMMIT 5 OF GENERATION 2")])
def test_a_generation_that_begins_without_the_newest_commit_says_so(
        known: CommitId | None, kept: CommitId | None, saved: CommitId | None, said: str,
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    held: list[CommitId] = []
    value = {"values": {"epoch": 3}, "samplers": {}}
    own = argparse.Namespace(
        job=argparse.Namespace(generation=2), newest=kept, newest_of_job=known, read=lambda: (kept, value),
        saved=lambda: None if saved is None else (saved, value), hold=lambda commit, *_: held.append(commit))
    topology = argparse.Namespace(rank=0, local_rank=0)
    monkeypatch.setattr(states.membership, "current", lambda: own)
    monkeypatch.setattr(states.runtime, "current", lambda: argparse.Namespace(topology=topology))
    monkeypatch.setattr(states.array_ops, "allgather_object", lambda found, name: [found])
    monkeypatch.setattr(states.array_ops, "broadcast_object", lambda found, root, name: found)
    found = states.ObjectState(epoch=0)
    with caplog.at_level(logging.WARNING):
        found.sync()
    assert [record.getMessage() for record in caplog.records if "LOST" in record.getMessage()] == \
        ([f"mpistrat: {said}"] if said else [])
    assert found.epoch == (0 if kept is None and saved is None else 3)
    assert held == ([] if kept is None else [kept])  # A commit of a file has the numbers of another job.


def test_a_stopped_agent_goes_on_when_a_rank_looks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a real process, which listens under the agent's name."""
    job = ElasticJob(tmp_path.name + str(os.getpid()), "ab" * 32, 1, ("127.0.0.1",), 9)
    listens = ("import socket, sys, threading; from mpistrat.process.connection import Listening; "
               "s = socket.socket(1); s.bind(chr(0) + sys.argv[1]); s.listen(); "
               "Listening(s, bytes.fromhex(sys.argv[2]), print); "
               "print('listens', flush=True); threading.Event().wait()")
    with subprocess.Popen([sys.executable, "-c", listens, socket_name(job), job.secret],
                          stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline() == b"listens\n"
            monkeypatch.setattr("mpistrat.process.connection._PROOF_LIMIT_S", 1.0)
            agent.send_signal(signal.SIGSTOP)
            found = member.agent_process(job)
            assert found is not None and found.pid == agent.pid
            wait_until(found.is_stopped, 10)
            member.connect_to_agent(job).close()
            assert not found.is_stopped()
        finally:
            agent.kill()


# -- orders to end an mpirun ------------------------------------------------------------------------------------------


def test_an_order_that_comes_before_its_mpirun_ends_it_and_not_the_next(capfd: pytest.CaptureFixture[str]) -> None:
    control = _Control()
    control.generation = 1
    control.stop(1, "SIGINT has arrived")  # Nothing waits for the signal yet.
    outcome = launch(LaunchCommand(("sleep", "600")), os.environ, interference=control)
    assert (outcome.code, outcome.why) == (1, "SIGINT has arrived")
    assert "SIGINT has arrived; mpirun gets SIGTERM\n" in capfd.readouterr().err
    control.generation = 2
    assert launch(LaunchCommand(("true",)), os.environ, interference=control).code == 0


def test_an_mpirun_that_is_ended_after_all_ranks_ended_well_is_no_failure(capfd: pytest.CaptureFixture[str]) -> None:
    control = _Control()
    control.begin(1)
    control.stop(1, "all ranks have ended", is_done=True)
    assert launch(LaunchCommand(("sleep", "600")), os.environ, interference=control).code == 0
    assert capfd.readouterr().err == ""


def test_a_generation_does_not_ask_again_which_mpirun_there_is() -> None:
    """A program that it starts would get a Ctrl-C that is for the supervisor."""
    mpirun = Mpirun("/no/mpirun", OPEN_MPI, "5.0.11")
    assert plan(options("-np 2"), (), ("true",), os.environ, mpirun).mpirun == mpirun


EARLY = """
import pathlib, sys
from mpistrat.cli import elastic_run, main
elastic_run.identify = lambda path: (print("looks for mpirun", flush=True), __import__("time").sleep(60))
sys.exit(main.main(["run", "--elastic", "-np", "2", "true"]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_start_has_the_exit_code_of_later_ones(number: signal.Signals, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", EARLY], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == b"looks for mpirun\n"
            job.send_signal(number)
            _, said = job.communicate(timeout=20)
        finally:
            job.kill()
    assert (job.returncode, said) == (code, f"mpistrat run: {number.name} has arrived\n".encode())


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


@pytest.mark.parametrize("line", [
    "--elastic", "--elastic=restart", "--min-np 1", "--max-np 2", "--host-discovery-script hosts.sh",
    "--slots-per-host 1", "--elastic-timeout 600", "--elastic-timeout 0", "--reset-limit 0",
    "--blacklist-cooldown-range 30 600", "--restart-failed", "--elastic-checkpoint saved",
    "--elastic-checkpoint-every 10"])
def test_each_option_of_elastic_jobs_makes_a_job_elastic(line: str) -> None:
    assert is_asked_for(options(f"-np 2 {line}"))


def test_other_options_make_no_job_elastic() -> None:
    assert not is_asked_for(options("-np 2 -H a:2 --oversubscribe --start-timeout 5 --log-level info --all-output"))
    assert limits_of(options("-np 2 --restart-failed")) == Limits(1, 2, restart_failed=True)


@pytest.mark.parametrize(("line", "text"), [
    ("--elastic --min-np 5 -np 4", "--min-np must be from 1 to .* Received: 5"),
    ("--elastic --min-np 2", "-np is missing"),
    ("--elastic -np 2 --reset-limit -1", "--reset-limit must be at least 0. Received: -1"),
    ("-np 2 --elastic-timeout nan", "--elastic-timeout must be at least 0. Received: nan"),
    ("--elastic -np 2 --blacklist-cooldown-range 9 3", "the lower one first"),
    ("--elastic -np 2 --elastic-checkpoint-every 0", "--elastic-checkpoint-every must be at least 1. Received: 0")])
def test_options_that_cannot_be_are_errors(line: str, text: str) -> None:
    with pytest.raises(LaunchError, match=text):
        limits_of(options(line))


TOLERANT = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")


@pytest.mark.parametrize(("version", "hosts", "found"), [
    ("5.0.11", 1, TOLERANT), ("5.0.11", 2, ()), ("5.0.9", 1, ()), ("4.1.4", 1, ()),
    ("5.1.0rc1", 1, TOLERANT)])
def test_fault_tolerance_is_asked_for_where_it_works(version: str, hosts: int, found: tuple[str, ...]) -> None:
    assert tolerant_options(Mpirun("mpirun", OPEN_MPI, version), hosts) == found
    assert tolerant_options(Mpirun("mpirun", MPICH, version), hosts) == ()


def test_only_the_generation_that_ends_the_job_leaves_a_timeline(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(elastic_run, "find_mpirun", lambda *_: "mpirun")
    monkeypatch.setattr(elastic_run, "identify", lambda _: Mpirun("mpirun", OPEN_MPI, "5.0.11"))
    for name in ("_TELL_S", "_FIRST_BACKOFF_S"):
        monkeypatch.setattr(f"mpistrat.elastic.supervisor_plan.{name}", 0.0)
    monkeypatch.setattr(last, "save", lambda told: f"saved {told}")
    generations = []

    def fails(wanted: object, mpirun: object, tolerant: object, variables: object, limits: object,
              interference: Interference) -> Outcome:
        generations.append(interference.subject)
        assert interference.keep_last([interference.subject]) == ""
        return Outcome(3, "")

    assert elastic_run.run(options("--elastic -np 2 --reset-limit 1"), fails) == 3
    assert generations == ["generation 1", "generation 2"]
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "saved" in line] == ["mpistrat run: saved ['generation 2']"]
    assert "generation 2 starts with 2 ranks on localhost:2. Training begins anew, because there is no " in said[0]


def test_a_hostfile_is_read_again_but_for_a_bad_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, said = tmp_path / "hosts", []
    monkeypatch.setattr("mpistrat.cli.elastic_run._say", said.append)
    path.write_text("node1 slots=4\nnode2 slots=2\n")
    find = HostFinder(options(f"--elastic -np 6 --hostfile {path}"))
    assert find() == {"node1": 4, "node2": 2}
    path.write_text("node1 slots=4\n")
    assert find() == {"node1": 4}
    path.write_text("node1 slots=many\n")
    assert find() is None and find() is None
    assert len(said) == 1 and "the list of hosts cannot be read, so it is unchanged" in said[0]
    path.unlink()
    assert find() is None and "No such file" in said[1]


def test_a_host_that_is_up_answers_or_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_ANSWER_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.2", 0), backlog=0) as full, contextlib.ExitStack() as callers:
        address = full.getsockname()
        monkeypatch.setattr(service, "_PORTS", address[1:])
        assert service._answering(["127.0.0.1", "127.0.0.2"]) == {"127.0.0.1", "127.0.0.2"}
        for _ in range(4):  # The kernel answers no more than the places for callers are.
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(address)
        assert service._answering(["127.0.0.1", "127.0.0.2"]) == {"127.0.0.1"}
        assert service._answering([]) == set()


@pytest.mark.parametrize("name", ["node..cluster", "n" * 64 + ".cluster"])
def test_a_name_that_no_host_can_have_has_no_address(name: str) -> None:
    assert addresses_towards([name]) == ["127.0.0.1"]


def test_an_allocation_whose_hosts_nobody_names_has_none_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setenv("PATH", "/nowhere")
    find = HostFinder(options("--elastic -np 2"))
    assert find() is None and "scontrol" in find.problem


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
    find = HostFinder(options(f"--max-np 8 --host-discovery-script {path}'"))
    assert find() is None and find.problem == "No closing quotation"


def test_slurm_says_how_many_tasks_each_node_has() -> None:
    assert slurm_counts("4(x2),3") == [4, 4, 3] and slurm_counts("2") == [2]


def test_a_commit_waits_for_the_gpu_before_the_ranks_agree_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def fail(self: object) -> None:
        raise EngineError("the GPU has failed")

    own = SimpleNamespace(number=0, why_leave="", is_saved=lambda *of, **also: False, connected=lambda: None,
                          commit=lambda *of: order.append("handed over"))
    monkeypatch.setattr(states.membership, "current", lambda: own)
    monkeypatch.setattr(states.array_ops, "allgather_object", lambda value, name: order.append("agreed") or [value])
    mpistrat.init()
    state = states.ObjectState(epoch=1)
    with monkeypatch.context() as waits:
        waits.setattr(type(runtime.current()), "await_gpu", lambda self: order.append("waited"))
        state.commit()
    assert order == ["waited", "agreed", "handed over"]
    monkeypatch.setattr(type(runtime.current()), "await_gpu", fail)
    state.epoch = 2
    with pytest.raises(EngineError, match="has failed"):
        state.commit()
    state.restore()
    mpistrat.shutdown()
    assert state.epoch == 1
