"""When the engine of a rank calls it blocked: round by round, with invented threads."""

import itertools

import pytest

from mpistrat.core.errors import DeadlockError, ShutdownError, StallError
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.interfaces import DeviceExecutor
from mpistrat.core.request import CollectiveType, Request
from mpistrat.core.settings import Settings
from mpistrat.engine.parked import ThreadScan
from mpistrat.engine.queue import TensorQueue

from .test_engine import ByHand, submit_barrier

SOON_S = 1.5  # Three looks: the first one sees the rank as it is, the second and the third that nothing changes.


class InventedScan(ThreadScan):
    """Threads of which the test says how often they have run; None: one of them may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] | None = {1: 10, 2: 20}
        self.looks = 0

    def look(self) -> dict[int, int] | None:
        self.looks += 1
        return self.seen


class WaitingJob(ByHand):
    """Engines whose ranks wait for different things."""

    def __init__(self, size: int, settings: Settings | None = None):
        self.scans = [InventedScan() for _ in range(size)]
        super().__init__(size, settings, self.scans)
        self.handles = [submit_barrier(engine, "a" if rank else "b") for rank, engine in enumerate(self.engines)]

    def pass_time(self, seconds: float) -> None:
        """Let the engines run so long, in steps of a tenth of a second."""
        for _ in range(round(seconds * 10)):
            self.settle(self.now + 0.1)

    @property
    def is_over(self) -> bool:
        """Whether all handles have failed; they all have or none has."""
        done = {handle.done() for handle in self.handles}
        assert len(done) == 1
        return done.pop()


@pytest.mark.parametrize("size", [2, 3, 18, 40])
def test_ranks_that_wait_for_each_other_fail_within_seconds(size: int) -> None:
    job = WaitingJob(size)
    job.pass_time(0.9)
    assert not job.is_over
    job.pass_time(SOON_S)
    for handle in job.handles:
        with pytest.raises(DeadlockError, match=r"^This is a deadlock: .*b: ranks \[0\] wait for ranks \[.*\], which "
                                                r"wait for a instead\..*hvd\.shard"):
            handle.wait(0)
    for engine in job.engines:
        with pytest.raises(DeadlockError):
            submit_barrier(engine, "c")
        assert isinstance(engine.controller.life.error, StallError)


@pytest.mark.parametrize("settings", [Settings(deadlock_check_disable=True), Settings(stall_check_disable=True)])
def test_the_settings_leave_it_to_the_limits_on_stalls(settings: Settings) -> None:
    job = WaitingJob(2, settings)
    job.pass_time(30.0)
    assert not job.is_over
    assert not any(scan.looks for scan in job.scans)
    job.settle(1e5)
    assert job.is_over != settings.stall_check_disable


@pytest.mark.parametrize("rank", [0, 1, 17])
def test_a_process_that_is_not_parked_is_not_blocked(rank: int) -> None:
    job = WaitingJob(18)
    job.scans[rank].seen = None
    job.pass_time(20.0)
    assert not job.is_over
    job.scans[rank].seen = {1: 1}
    job.pass_time(SOON_S)
    assert job.is_over


@pytest.mark.parametrize("rank", [0, 1, 17])
def test_a_thread_that_runs_now_and_then_makes_no_process_blocked(rank: int) -> None:
    job = WaitingJob(18)
    for times in range(20):
        job.scans[rank].seen = {1: times}
        job.pass_time(0.5)
        assert not job.is_over
    job.pass_time(SOON_S)
    assert job.is_over


@pytest.mark.parametrize("rank", [0, 1, 17])
def test_a_rank_that_was_blocked_and_runs_again_takes_it_back(rank: int) -> None:
    job = WaitingJob(18)
    last = job.scans[3]
    last.seen = None
    job.pass_time(5.0)
    job.scans[rank].seen = None
    job.pass_time(1.0)
    last.seen = {1: 1}
    job.pass_time(5.0)
    assert not job.is_over
    job.scans[rank].seen = {1: 1}
    job.pass_time(SOON_S)
    assert job.is_over


def test_a_rank_that_goes_on_makes_no_deadlock() -> None:
    job = WaitingJob(2)
    job.scans[0].seen = None
    job.pass_time(5.0)
    for rank, name in enumerate("ab"):
        job.handles.append(submit_barrier(job.engines[rank], name))
    job.settle()
    assert all(handle.wait(0) == [] for handle in job.handles)


def test_a_rank_that_does_something_is_not_blocked() -> None:
    job = WaitingJob(2)
    for step in range(10):
        submit_barrier(job.engines[1], f"more {step}")
        job.pass_time(0.9)
        assert not job.is_over
    job.pass_time(SOON_S)
    assert job.is_over


def test_nothing_is_looked_at_while_a_rank_waits_for_nothing() -> None:
    job = ByHand(2, scans=(scans := [InventedScan(), InventedScan()]))
    for now in range(100):
        job.settle(now / 10)
    submit_barrier(job.engines[1], "a")
    job.settle(20.0)
    assert [scan.looks for scan in scans] == [0, 0]
    job.settle(21.0)
    assert [scan.looks for scan in scans] == [0, 1]


def test_a_rank_whose_gpu_works_is_not_blocked() -> None:
    class BusyDevice(DeviceExecutor):
        is_busy = True

    job = WaitingJob(2)
    job.engines[1].controller._standstill._device = device = BusyDevice()
    job.pass_time(10.0)
    assert not job.is_over
    device.is_busy = False
    job.pass_time(SOON_S)
    assert job.is_over


def test_another_engine_of_the_process_may_wake_what_this_one_waits_for() -> None:
    job = WaitingJob(2)
    other = TensorQueue()
    other.put(Entry(Request(CollectiveType.BARRIER, "c"), [], Handle("c")))
    other.take_new()
    job.scans[1].queues.append(other)
    job.pass_time(10.0)
    assert not job.is_over
    other.close(StallError("it has ended, and wakes nothing any more"))
    job.pass_time(SOON_S)
    assert job.is_over


def test_a_rank_that_has_ended_counts_as_blocked() -> None:
    job = ByHand(3, scans=(scans := [InventedScan() for _ in range(3)]))
    for name in "ab":
        submit_barrier(job.engines[2], name)
    handles = [submit_barrier(job.engines[rank], "ab"[rank]) for rank in range(2)]
    job.engines[2].announce_end()
    scans[2].seen = None  # It evaluates, or waits in shutdown().
    for step in range(30):
        job.settle(step / 10)
    for handle in handles:
        with pytest.raises(DeadlockError, match=r"a: ranks \[0, 2\] wait for ranks \[1\], which wait for b instead\."):
            handle.wait(0)


def test_a_rank_that_has_ended_is_named_before_any_deadlock() -> None:
    job = WaitingJob(3)
    job.pass_time(0.5)
    lone = submit_barrier(job.engines[0], "c")
    job.engines[2].announce_end()
    job.settle()
    with pytest.raises(ShutdownError, match=r"wait for ranks \[2\], which have already shut down"):
        lone.wait(0)


def test_ranks_that_only_wait_in_shutdown_end_well() -> None:
    job = ByHand(3, scans=[InventedScan() for _ in range(3)])
    for engine, now in zip(job.engines, itertools.count(10, 10), strict=False):
        engine.announce_end()
        for step in range(30):
            job.settle(now + step / 10)
    assert all(engine.controller.life.ended.is_set() for engine in job.engines)
    assert [engine.controller.life.error for engine in job.engines] == [None] * 3


def test_a_vote_that_is_open_is_no_deadlock_until_it_has_ended() -> None:
    job = WaitingJob(2)
    for engine in job.engines:
        engine.controller._fast_path.is_open = True
        engine.controller._standstill.look(0.0)
        engine.controller._standstill.look(1.0)
        engine.controller._standstill.look(2.0)
        assert not engine.controller._coordinator._subtree.blocked._after
        engine.controller._fast_path.is_open = False
    job.now = 3.0
    job.pass_time(2 * SOON_S)
    assert job.is_over
