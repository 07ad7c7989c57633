"""Ranks that are lost: the error that names them, the waits that end, and how the end of a process is noticed."""

import contextlib
import copy
import errno
import os
import pickle
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.api import runtime
from mpistrat.api.elastic import recover
from mpistrat.api.job import Losses
from mpistrat.core.errors import EngineError, LostRank, RanksLostError, RecoveryError
from mpistrat.core.interruption import Interruption
from mpistrat.core.request import allgather_request, specs_of
from mpistrat.core.topology import Topology
from mpistrat.process import abort, peers, procfs
from mpistrat.process.peers import Neighbours
from mpistrat.process.procfs import Process
from mpistrat.transport.host_link import FdExchange
from mpistrat.transport.shm.segment import PACKED, HostMemory
from tests.support.thread_group import ThreadGroup

from ..support.engines import make_engine
from ..support.shared_memory_of_threads import host_files

FIRST, SECOND = LostRank(3, "node2", "process 4711 has died"), LostRank(1, "node1", "process 12 has died")
LIMIT_S = 30.0


# -- the error --------------------------------------------------------------------------------------------------------


def test_the_error_names_the_lost_ranks() -> None:
    error = RanksLostError([FIRST, SECOND])
    assert isinstance(error, EngineError)
    assert error.lost == (FIRST, SECOND)
    assert str(error).startswith("Lost: rank 3 on node2 (process 4711 has died); rank 1 on node1 (")


@pytest.mark.parametrize("same", [lambda error: pickle.loads(pickle.dumps(error)), copy.deepcopy, copy.copy])
def test_the_error_can_be_copied(same: Callable[[RanksLostError], RanksLostError]) -> None:
    error = RanksLostError([FIRST])
    error.add([SECOND, FIRST])
    other = same(error)
    assert (type(other), other.lost, str(other)) == (RanksLostError, (FIRST, SECOND), str(error))


def test_ranks_that_are_lost_later_are_added_to_the_error() -> None:
    interruption = Interruption()
    interruption.check()
    error = interruption.add([FIRST])
    assert interruption.add([SECOND]) is error
    with pytest.raises(RanksLostError) as raised:
        interruption.check()
    assert raised.value.lost == (FIRST, SECOND)


def test_ranks_do_not_recover_from_the_loss_of_one_that_had_the_only_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort, "_leaves", False)  # This process is no rank.
    losses = Losses(Topology(1, ("here",) * 2))
    losses.is_tolerant = True
    losses.irreplaceable[0] = "Only it had the slots."
    losses.lose([LostRank(0, "here", "process 4711 has died")])
    monkeypatch.setattr(runtime, "current", lambda: SimpleNamespace(losses=losses))
    with pytest.raises(RecoveryError, match=r"rank 0 is lost\. Only it had the slots\."):
        recover()
    losses.stop()


# -- waits ------------------------------------------------------------------------------------------------------------


def interrupted(wait: Callable[[], object], interruption: Interruption) -> None:
    """`wait` does not return before the interruption, and raises the error then."""
    ended: queue.SimpleQueue[object] = queue.SimpleQueue()

    def run() -> None:
        try:
            ended.put(wait())
        except RanksLostError as error:
            ended.put(error.lost)
    threading.Thread(target=run, daemon=True).start()
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.1)
    interruption.add([FIRST])
    assert ended.get(timeout=LIMIT_S) == (FIRST,)


def test_a_wait_in_shared_memory_is_interrupted() -> None:
    interruption, file = Interruption(), host_files(1)[0]
    with contextlib.closing(file):
        memory = HostMemory(file.map(HostMemory.size_for(2, 0)), 0, (0, 1), interruption=interruption)
    interrupted(lambda: memory.await_all(1, PACKED), interruption)


def test_the_wait_for_ranks_that_take_no_descriptors_is_interrupted() -> None:
    interruption = Interruption()
    with contextlib.closing(FdExchange(0, (0, 1), interruption)) as exchange:
        interrupted(lambda: exchange.give({1: [0]}), interruption)


def test_an_engine_refuses_all_operations_once_ranks_are_lost() -> None:
    group, interruption = ThreadGroup(2), Interruption()
    engine = make_engine(0, 2, group.control(0), group.data(0), interruption=interruption)
    engine.start()
    array = np.ones(3)
    waiting = engine.submit(allgather_request("a", specs_of([array])), [array])
    engine.interrupt(interruption.add([FIRST]))
    with pytest.raises(RanksLostError):  # At once, whatever the engine's thread does.
        engine.submit(allgather_request("b", specs_of([array])), [array])
    with pytest.raises(RanksLostError):
        waiting.wait(LIMIT_S)
    assert engine.await_interrupted(LIMIT_S)
    assert engine.controller.life.error is interruption.error


def test_an_error_that_is_a_sign_of_a_loss_becomes_the_loss() -> None:
    group, interruption = ThreadGroup(2), Interruption(is_watched=True)
    engine = make_engine(0, 2, group.control(0), group.data(0), interruption=interruption)
    threading.Timer(0.05, interruption.add, [[FIRST]]).start()
    engine.controller.life.fail(OSError("the connection to another rank has died"))
    assert engine.controller.life.error is interruption.error is not None


# -- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("code", [0, errno.ENOSYS, errno.EPERM], ids=["pidfd", "old kernel", "container"])
def test_the_end_of_a_process_is_noticed(sleeper: "subprocess.Popen[bytes]", code: int,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    if code:
        monkeypatch.setattr(os, "pidfd_open", Mock(side_effect=OSError(code, "there is none")))
    ended: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    watch = Neighbours({3: procfs.find(sleeper.pid)}, [3], ended.put)
    sleeper.send_signal(signal.SIGSTOP)  # A process that is stopped has not ended.
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.2)
    sleeper.kill()
    assert ended.get(timeout=LIMIT_S) == [3]
    watch.stop()
    watch.stop()
    assert ended.empty()


def test_a_process_that_is_stopped_is_told_of_until_it_goes_on(sleeper: "subprocess.Popen[bytes]",
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_STOP_LOOK_S", 0.05)
    told: queue.SimpleQueue[tuple[int, float]] = queue.SimpleQueue()
    watch = Neighbours({3: procfs.find(sleeper.pid)}, [3], lambda _: None, beside=3,
                       when_stopped=lambda *stop: told.put(stop))
    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)
    sleeper.send_signal(signal.SIGSTOP)
    assert [told.get(timeout=LIMIT_S) for _ in range(2)] == [(3, 0.05), (3, 0.1)]
    sleeper.send_signal(signal.SIGCONT)
    assert 0.0 in (told.get(timeout=LIMIT_S)[1] for _ in range(10))
    watch.stop()


def test_each_rank_of_a_host_is_looked_at_by_one_other() -> None:
    topology = Topology(0, ("a", "b", "a", "a"))
    processes = {rank: Process(0, 0, 0, 0) for rank in range(4)}
    looked_at = []
    for rank in (0, 2, 3):
        losses = Losses(Topology(rank, topology.host_of), processes={each: processes[each] for each in (0, 2, 3)})
        assert losses._neighbours is not None and losses._neighbours._beside is not None
        looked_at.append(losses._neighbours._beside[0])
        losses.stop()
    assert sorted(looked_at) == [0, 2, 3]


@pytest.mark.parametrize(("limit_s", "is_killed"), [(0.0, False), (8.0, True)])
def test_a_rank_that_is_stopped_is_reported_and_killed_if_the_settings_say_so(
        sleeper: "subprocess.Popen[bytes]", caplog: pytest.LogCaptureFixture, limit_s: float, is_killed: bool) -> None:
    losses = Losses(Topology(0, ("here",) * 2), processes={1: procfs.find(sleeper.pid)}, stopped_limit_s=limit_s)
    losses.stop()
    for seconds in range(1, 10):
        losses._note_stopped(1, float(seconds))
    assert caplog.text.count(f"rank 1 on here (process {sleeper.pid}) has been stopped for 5 s") == 1
    assert f"kill -CONT {sleeper.pid}" in caplog.text
    assert ("is killed: it has been stopped for 8 s (MPISTRAT_STOPPED_LIMIT_S)" in caplog.text) is is_killed
    if is_killed:
        assert sleeper.wait(LIMIT_S) == -signal.SIGKILL
    else:
        assert sleeper.poll() is None


def test_a_process_of_another_container_is_not_watched(sleeper: "subprocess.Popen[bytes]") -> None:
    found = procfs.find(sleeper.pid)
    ended: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    elsewhere = Process(found.pid, found.started + 1, found.parent, found.group)
    watch = Neighbours({3: elsewhere}, [3], ended.put)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(queue.Empty):
        ended.get(timeout=0.2)
    watch.stop()


def test_ranks_whose_processes_cannot_be_watched_are_asked_for() -> None:
    ended: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    reports = iter([[], [5], [5], [4, 5]])
    watch = Neighbours({}, [4, 5], ended.put, lambda: next(reports, [4, 5]))
    assert [ended.get(timeout=LIMIT_S) for _ in range(2)] == [[5], [4]]
    watch.stop()
    assert ended.empty()
