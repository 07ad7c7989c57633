"""Deadlocks as rank 0 sees them: every rank waits, nothing is complete, and nothing new has come for DEADLOCK_S."""

import pytest

from mpistrat.core.interfaces import DeviceExecutor
from mpistrat.core.request import join_request
from mpistrat.core.settings import Settings
from mpistrat.negotiation.messages import EndReason
from mpistrat.negotiation.subtree import depth_of

from ..support.engines import ByHand, submit_barrier
from .test_coordinator import ABORT_S, WARNING_S, Job, allreduce, coordinator

DEADLOCK_S = 10.0
A, B = allreduce("a"), allreduce("b")


class QuietJob(Job):
    """Rank 0 has learned of nothing new for `quiet_s`."""

    def __init__(self, size: int):
        super().__init__(size)
        self.nodes = [coordinator(rank, size, WARNING_S, ABORT_S, DEADLOCK_S) for rank in range(size)]
        # Each rank on the way to rank 0 keeps a request for 2.5 s, and looks every second.
        self.latest_s = DEADLOCK_S + 3.5 * (depth_of(size - 1) - 1)

    def is_deadlock(self, quiet_s: float) -> bool:
        _, decision = self.nodes[0].advance(self.now, quiet_s)
        return decision is not None and decision.end is EndReason.DEADLOCK


@pytest.mark.parametrize("size", [2, 3, 18, 40, 300])
def test_ranks_that_all_wait_for_each_other_end(size: int) -> None:
    job = QuietJob(size)
    job.submit_all(A, but=[size - 1])
    job.submit(size - 1, B)
    job.settle(0.0, 2.5, 5.0, 7.5)  # These requests reach rank 0.
    assert not job.is_deadlock(job.latest_s - 0.1)
    _, decision = job.nodes[0].advance(job.now, job.latest_s)
    assert decision is not None and decision.end is EndReason.DEADLOCK
    text = decision.end_text
    assert text.startswith("This is a deadlock: every rank waits for a collective that another rank has not called, ")
    assert "none has called another one for 10 s." in text
    assert f" wait for ranks [{size - 1}], which wait for b instead." in text
    assert f"b: ranks [{size - 1}] wait for ranks [" in text
    assert "], which wait for a instead." in text
    assert "hvd.shard(x, y)" in text and "`if rank == 0`" in text
    assert "raise MPISTRAT_DEADLOCK_S (0: never)" in text


@pytest.mark.parametrize(("size", "odd", "free"), [(2, 1, 0), (3, 0, 2), (18, 17, 1), (300, 290, 299), (300, 5, 18)])
def test_one_rank_that_waits_for_nothing_is_enough_for_no_deadlock(size: int, odd: int, free: int) -> None:
    job = QuietJob(size)
    job.submit_all(A, but={odd, free})
    if odd != free:
        job.submit(odd, B)
    job.settle(0.0, 10.0, 20.0)
    assert not job.is_deadlock(59.0)
    job.submit(free, allreduce("c")).settle(30.0, 40.0, 50.0)
    assert job.is_deadlock(job.latest_s)


def test_what_is_complete_is_decided_on_first() -> None:
    job = QuietJob(2)
    assert not job.is_deadlock(59.0)  # Nothing is waited for.
    job.submit_all(A)
    job.submit(0, B)
    assert not job.is_deadlock(0.0)
    assert not job.is_deadlock(59.0)


def test_a_rank_that_has_joined_waits() -> None:
    job = QuietJob(3)
    job.submit(2, join_request())
    job.submit(0, A)
    job.submit(1, B).settle()
    assert job.is_deadlock(job.latest_s)


def test_a_rank_that_has_ended_while_others_wait_for_each_other() -> None:
    # What it has submitted is no reason to wait for it, so that the other reason to end does not apply.
    job = QuietJob(3)
    job.submit_all(A, but=[0])
    job.submit_all(B, but=[1])
    job.nodes[2].end(0)
    job.settle()
    assert job.end()[0] is None
    assert job.is_deadlock(job.latest_s)


@pytest.mark.parametrize(("settings", "is_found"), [
    (Settings(deadlock_s=5.0), True), (Settings(deadlock_s=0.0), False),
    (Settings(deadlock_s=5.0, stall_check_disable=True), False)])
def test_the_settings_say_after_how_long(settings: Settings, is_found: bool) -> None:
    job = ByHand(2, settings)
    handles = [submit_barrier(engine, f"of rank {rank}") for rank, engine in enumerate(job.engines)]
    for now in (0.0, 4.0, 4.9):
        job.settle(now)
        assert not any(handle.is_done for handle in handles)
    job.settle(5.0)
    assert [handle.is_done for handle in handles] == [is_found] * 2


def test_what_any_rank_submits_begins_the_time_anew() -> None:
    job = ByHand(2, Settings(deadlock_s=5.0))
    handles = [submit_barrier(engine, f"of rank {rank}") for rank, engine in enumerate(job.engines)]
    job.settle(0.0)
    submit_barrier(job.engines[1], "another")
    job.settle(4.0)
    submit_barrier(job.engines[0], "one more")
    job.settle(4.5, 9.4)
    assert not any(handle.is_done for handle in handles)
    job.settle(9.5)
    assert all(handle.is_done for handle in handles)


def test_what_a_rank_executes_begins_the_time_anew() -> None:
    job = ByHand(2, Settings(deadlock_s=5.0))
    waiting = [submit_barrier(engine, f"of rank {rank}") for rank, engine in enumerate(job.engines)]
    executor = job.engines[0].controller.executor
    execute = executor.execute

    def slow(*args: object, **kwargs: object) -> None:
        execute(*args, **kwargs)  # type: ignore[arg-type]
        job.now += 20.0

    executor.execute = slow  # type: ignore[method-assign]
    handles = [submit_barrier(engine, "for both") for engine in job.engines]
    job.settle(0.0)
    assert all(handle.is_done for handle in handles)
    job.settle(job.now + 4.9)
    assert not any(handle.is_done for handle in waiting)
    job.settle(job.now + 0.1)
    assert all(handle.is_done for handle in waiting)


def test_work_of_a_gpu_begins_the_time_anew_when_it_is_done() -> None:
    job = ByHand(2, Settings(deadlock_s=5.0))
    ends = [20.0]

    class SlowDevice(DeviceExecutor):
        batches = ends

        def poll(self) -> bool:
            return bool(ends) and job.now >= ends[0] and ends.pop() > 0

    job.engines[0].controller.executor.device = SlowDevice()
    waiting = [submit_barrier(engine, f"of rank {rank}") for rank, engine in enumerate(job.engines)]
    for now in (0.0, 19.0, 20.0, 24.9):
        job.settle(now)
        assert not any(handle.is_done for handle in waiting)
    job.settle(25.0)
    assert all(handle.is_done for handle in waiting)
