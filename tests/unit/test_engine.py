"""The engine: by hand, round by round, and with threads as ranks."""

import dataclasses
import dis
import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import CodeType, FrameType

import numpy as np
import pytest

import mpistrat
from mpistrat.core import signal_handlers
from mpistrat.core.arithmetic import Reduction
from mpistrat.core.errors import EngineError, MismatchError, ShutdownError, StallError
from mpistrat.core.handle import Handle, drivers
from mpistrat.core.interfaces import DataPlane, DeviceExecutor
from mpistrat.core.request import Average, Max, ReduceOp, ScaledOp, Sum, allreduce_request, broadcast_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.engine.controller import SHUT_DOWN_TEXT
from mpistrat.engine.engine import Engine
from mpistrat.engine.queue import TensorQueue
from tests.support.thread_group import ThreadControl, ThreadData, ThreadGroup

from ..support import engines as engines_of_tests
from ..support.engines import LONG_S, ByHand, make_engine, on_all, run, running, submit, submit_barrier


@pytest.fixture(autouse=True, params=[True, False], ids=["votes", "messages"])
def _with_votes_and_without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_of_tests, "votes", request.param)


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_step_says_whether_anything_happened() -> None:
    engine, = ByHand(1).engines
    assert not engine.controller.run_cycle()
    submit_barrier(engine, "a")
    assert engine.controller.run_cycle()
    assert not engine.controller.run_cycle()


@pytest.mark.parametrize("size", [2, 18])
def test_a_stall_fails_every_handle_on_every_rank(size: int) -> None:
    job = ByHand(size, Settings(deadlock_s=0.0))
    waiting = [submit_barrier(engine, "a") for engine in job.engines[:-1]]
    other = submit_barrier(job.engines[-1], "b")
    for now in (0.0, 31.0, 62.0, 600.0):
        job.settle(now)
        assert not any(handle.is_done for handle in [*waiting, other])
    job.settle(632.0)
    for handle in [*waiting, other]:
        with pytest.raises(StallError, match=rf"a: ranks \[.*\] have waited 632 s for ranks \[{size - 1}\], which wait "
                                             r"for b instead"):
            handle.wait(0)
    for engine in job.engines:
        with pytest.raises(StallError):
            submit_barrier(engine, "c")
        assert isinstance(engine.controller.life.error, StallError)


@pytest.mark.parametrize("settings", [Settings(stall_check_disable=True), Settings(stall_abort_s=0.0)])
def test_without_a_limit_a_stall_lasts(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    job = ByHand(2, settings)
    handle = submit_barrier(job.engines[0], "a")
    job.settle(0.0, 1e5)
    assert not handle.is_done
    assert bool(caplog.messages) != settings.stall_check_disable
    submit_barrier(job.engines[1], "a")
    job.settle()
    assert handle.is_done


def test_a_mismatch_fails_the_handle_on_every_rank_and_nothing_else() -> None:
    job = ByHand(3)
    odd = [submit(engine, "a", np.zeros(rank // 2 + 1)) for rank, engine in enumerate(job.engines)]
    fine = [submit_barrier(engine, "b") for engine in job.engines]
    job.settle()
    for handle in odd:
        with pytest.raises(MismatchError, match=r"^a: the ranks disagree on shape: \(1,\) on ranks \[0, 1\]; \(2,\) on "
                                                r"ranks \[2\]\.$"):
            handle.wait(0)
    assert all(handle.wait(0) == [] for handle in fine)
    again = [submit_barrier(engine, "a") for engine in job.engines]
    job.settle()
    assert all(handle.is_done for handle in again)


def test_an_engine_that_is_abandoned_fails_what_is_pending_and_all_that_comes() -> None:
    job = ByHand(3)
    pending = submit_barrier(job.engines[1], "a")
    job.engines[1].abandon("ranks [2] have died")
    job.settle()
    with pytest.raises(EngineError, match=r"^ranks \[2\] have died$"):
        pending.wait(0)
    with pytest.raises(EngineError, match=r"^ranks \[2\] have died$"):
        submit_barrier(job.engines[1], "b")
    assert str(job.engines[1].controller.life.error) == "ranks [2] have died"


def test_a_callback_may_submit_the_same_name_again() -> None:
    engine, = ByHand(1).engines
    later: list[Handle] = []
    submit_barrier(engine, "a").when_done(lambda _: later.append(submit_barrier(engine, "a")))
    engine.controller.run_cycle()
    engine.controller.run_cycle()
    assert later[0].is_done


# -- with threads as ranks --------------------------------------------------------------------------------------------


class CountingData(ThreadData):
    """Notes how many elements each all-reduce and broadcast had."""

    def __init__(self, group: ThreadGroup, rank: int):
        super().__init__(group, rank)
        self.reduced: list[int] = []
        self.broadcasts: list[int] = []

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        self.reduced.append(sum(source.size for source in sources))
        super().allreduce(sources, targets, reduction)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        self.broadcasts.append(array.size)
        super().broadcast(array, root_rank)


def run_once(size: int, work: Callable[[int, Engine], list[Handle]],
             settings: Settings | None = None) -> tuple[list[list[list[np.ndarray]]], list[CountingData]]:
    """The results of work that is submitted as one batch, by rank, and the collectives it took."""
    group = ThreadGroup(size, timeout_s=LONG_S)
    planes = [CountingData(group, rank) for rank in range(size)]
    with running(size, settings, planes, group, start=False) as engines:
        handles = [work(rank, engine) for rank, engine in enumerate(engines)]
        for engine in engines:
            engine.start()
        return [[handle.wait(LONG_S) for handle in each] for each in handles], planes


# -- callers that drive -----------------------------------------------------------------------------------------------


def test_a_caller_that_waits_needs_no_thread_and_takes_what_was_submitted_before_along() -> None:
    engine, = ByHand(1).engines
    earlier = submit(engine, "a", np.ones(1))
    np.testing.assert_array_equal(run(engine, "b", np.arange(3.0)).wait(0)[0], [0, 1, 2])
    assert earlier.is_done


def test_a_caller_stops_waiting_at_its_limit() -> None:
    job = ByHand(2)
    handle = run(job.engines[0], "a", np.ones(1), limit_s=0.0)
    assert not handle.is_done
    mismatch = submit_barrier(job.engines[1], "a")
    job.settle()
    assert handle.is_done and mismatch.is_done


class NoWait(ThreadControl):
    """Control messages of a rank that has nothing to wait for."""

    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        raise AssertionError("waits for nothing")


class LateLock:
    """A lock whose owner-to-be is overtaken by another driver."""

    def __init__(self, overtake: Callable[[], object]):
        self._overtake, self._lock = overtake, threading.Lock()
        self.release, self.locked = self._lock.release, self._lock.locked

    def acquire(self, blocking: bool = True) -> bool:
        """Let the other driver finish, then succeed."""
        self._overtake()
        return self._lock.acquire(blocking)


def test_a_caller_whose_work_another_driver_has_done_does_not_wait() -> None:
    group = ThreadGroup(1)
    engine = make_engine(0, 1, NoWait(group, 0), group.data(0), Settings())
    engine._driving = LateLock(engine.controller.run_cycle)  # type: ignore[assignment]
    assert run(engine, "a", np.ones(1)).is_done
    assert engine.controller.life.error is None


def test_an_abandoned_engine_waits_for_nobody() -> None:
    group = ThreadGroup(2, timeout_s=LONG_S)
    engine = make_engine(0, 2, group.control(0), group.data(0), Settings())
    engine.start()
    pending = submit_barrier(engine, "a")
    engine.abandon("ranks [1] have died")
    engine.abandon("ranks [1] have died")
    engine.end()
    assert pending.is_done


def test_the_end_waits_for_the_thread_also_when_the_engine_has_ended_before() -> None:
    class SlowDevice(DeviceExecutor):
        def abandon(self) -> None:
            time.sleep(0.3)

    group = ThreadGroup(1)
    engine = make_engine(0, 1, group.control(0), group.data(0), device=SlowDevice())
    engine.start()
    engine.controller.life.abandoned = EngineError("on purpose")
    engine.announce_end()
    assert engine.controller.life.ended.wait(LONG_S)
    assert engine._thread is not None and engine._thread.is_alive()
    engine.end()
    assert not engine._thread.is_alive()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_many_threads_may_wait_and_submit_at_once(size: int) -> None:
    def work(rank: int, engine: Engine) -> list:
        def one(thread: int) -> list[float]:
            results = []
            for i in range(15):
                call = run if (thread + i + rank) % 2 else submit
                results.append(float(call(engine, f"{thread}", np.array(float(i))).wait(LONG_S)[0]))
            return results
        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, range(4)))

    with running(size) as engines:
        for result in on_all(engines, work):
            assert result == [[float(size * i) for i in range(15)]] * 4


def test_what_is_submitted_while_a_caller_drives_is_done_after_the_caller_has_left() -> None:
    with running(2) as engines:
        def work(rank: int, engine: Engine) -> list:
            later: list[Handle] = []
            submit(engine, "first", np.ones(1)).when_done(lambda _: later.append(submit(engine, "later", np.ones(1))))
            run(engine, "second", np.ones(1))
            submit(engine, "third", np.ones(1)).wait(LONG_S)
            return later[0].wait(LONG_S)

        for result in on_all(engines, work):
            np.testing.assert_array_equal(result[0], [2])


# -- fusion -----------------------------------------------------------------------------------------------------------


def test_what_is_ready_together_is_reduced_together() -> None:
    results, planes = run_once(2, lambda rank, engine: [submit(engine, f"{i}", np.full(i, 1.0)) for i in range(5)])
    assert [plane.reduced for plane in planes] == [[10], [10]]
    for rank in results:
        for i, (result,) in enumerate(rank):
            np.testing.assert_array_equal(result, np.full(i, 2.0))


def test_a_group_that_is_larger_than_the_threshold_comes_back_whole() -> None:
    group = [np.full(10, float(i)) for i in range(7)]
    results, planes = run_once(3, lambda rank, engine: [submit(engine, "g", *group)], Settings(fusion_bytes=240))
    assert planes[0].reduced == planes[1].reduced == planes[2].reduced == [30, 30, 10]
    for rank in results:
        for i, result in enumerate(rank[0]):
            np.testing.assert_array_equal(result, np.full(10, 3.0 * i))


def test_different_operations_and_scales_do_not_share_a_reduction() -> None:
    one = np.full(2, 3.0)

    def work(rank: int, engine: Engine) -> list[Handle]:
        return [submit(engine, "sum", one + rank), submit(engine, "max", one + rank, op=Max),
                submit(engine, "average", one + rank, op=Average), submit(engine, "pre", one + rank, prescale=2.0),
                submit(engine, "post", one + rank, postscale=3.0), submit(engine, "sum2", one + rank)]

    results, planes = run_once(2, work)
    assert planes[0].reduced == [4, 2, 2, 2, 2]
    for rank in results:
        assert [float(result[0][0]) for result in rank] == [7, 4, 3.5, 14, 21, 7]


def test_broadcasts_of_one_root_and_dtype_are_sent_together() -> None:
    def work(rank: int, engine: Engine) -> list[Handle]:
        arrays = [np.full(3, 10.0 * rank), np.full(4, 10.0 * rank + 1)]
        requests = [broadcast_request(f"{root}/{i}", specs_of([array]), root, range(3))
                    for root in (2, 0) for i, array in enumerate(arrays)]
        return [engine.submit(request, [array]) for request, array in zip(requests, arrays * 2, strict=True)]

    results, planes = run_once(3, work)
    assert [plane.broadcasts for plane in planes] == [[7, 7]] * 3
    for rank in results:
        assert [float(result[0][0]) for result in rank] == [20, 21, 0, 1]


# -- failures ---------------------------------------------------------------------------------------------------------


class BrokenError(Exception):
    """What the data plane raises in these tests."""


class FailingData(ThreadData):
    """Fails on an all-reduce of 13 elements: after the exchange, or before it, so that no rank gets its result."""

    def __init__(self, group: ThreadGroup, rank: int, before: bool):
        super().__init__(group, rank)
        self._before = before

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        is_the_one = [source.size for source in sources] == [13]
        if is_the_one and self._before:
            # As MPI would end the others' wait, sooner or later: once they have left the barrier before, and are here.
            while self._group.barrier.n_waiting < self._group.size - 1:
                threading.Event().wait(0.001)
            self._group.barrier.abort()
            raise BrokenError("the network is gone")
        super().allreduce(sources, targets, reduction)
        if is_the_one:
            raise BrokenError("the network is gone")


def failing(size: int, failed: int, before: bool) -> tuple[ThreadGroup, list[DataPlane]]:
    group = ThreadGroup(size, timeout_s=LONG_S)
    return group, [FailingData(group, rank, before) if rank == failed else group.data(rank) for rank in range(size)]


@pytest.mark.parametrize(("size", "failed"), [(1, 0), (2, 0), (2, 1), (3, 2), (18, 1), (18, 17)])
def test_a_failure_on_one_rank_reaches_every_handle_on_every_rank(size: int, failed: int) -> None:
    # Rank 1 of 18 is the one that rank 17 hears everything from.
    group, planes = failing(size, failed, before=False)
    with running(size, None, planes, group) as engines:
        # Only some ranks submit "open", so that it is still in flight when the engine fails.
        waiting = [submit(engine, "open", np.zeros(1)) for engine in engines[:max(1, size - 1)]] if size > 1 else []
        fatal = [submit(engine, "fatal", np.zeros(13)) for engine in engines]
        with pytest.raises(EngineError) as first:
            fatal[failed].wait(LONG_S)
        for handle in waiting:
            with pytest.raises(EngineError) as caught:
                handle.wait(LONG_S)
            assert str(caught.value) == str(first.value)
        for rank in set(range(size)) - {failed}:
            np.testing.assert_array_equal(fatal[rank].wait(LONG_S)[0], np.zeros(13))
        text = str(first.value)
        assert text.startswith(f"The engine of rank {failed} failed: BrokenError('the network is gone')")
        assert "Traceback (most recent call last)" in text
        assert "in allreduce" in text
    for engine in engines:
        with pytest.raises(EngineError) as caught:
            submit(engine, "later", np.zeros(1))
        assert str(caught.value) == text
        assert str(engine.controller.life.error) == text


@pytest.mark.parametrize(("size", "failed"), [(2, 0), (3, 1)])
def test_a_failure_in_a_collective_leaves_no_handle_and_keeps_what_was_complete(size: int, failed: int) -> None:
    group, planes = failing(size, failed, before=True)
    with running(size, None, planes, group, start=False) as engines:
        handles = [[submit(engine, name, np.ones(elements, dtype)) for name, elements, dtype in (
            ("good", 4, np.float32), ("fatal", 13, np.float64), ("other", 4, np.int32))] for engine in engines]
        for engine in engines:
            engine.start()
        for good, *others in handles:
            np.testing.assert_array_equal(good.wait(LONG_S)[0], np.full(4, size))
            for handle in others:
                with pytest.raises(EngineError, match=r"^The engine of rank \d failed: "):
                    handle.wait(LONG_S)


@pytest.mark.parametrize("size", [1, 2])
def test_a_failure_reaches_a_caller_that_drives_as_it_reaches_all(size: int) -> None:
    group, planes = failing(size, 0, before=False)
    with running(size, None, planes, group) as engines:
        on_all(engines, lambda rank, engine: [run(engine, "fatal", np.zeros(13))])
        for engine in engines:
            with pytest.raises(EngineError, match=r"^The engine of rank 0 failed: BrokenError"):
                run(engine, "later", np.zeros(1)).wait(LONG_S)


def test_ctrl_c_in_a_caller_that_drives_is_raised_there_and_ends_all() -> None:
    class Interrupted(ThreadData):
        def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
            raise KeyboardInterrupt

    group = ThreadGroup(1)
    engine = make_engine(0, 1, group.control(0), Interrupted(group, 0), Settings())
    with pytest.raises(KeyboardInterrupt):
        run(engine, "a", np.ones(1))
    with pytest.raises(EngineError, match="KeyboardInterrupt"):
        submit(engine, "b", np.ones(1))


def test_a_mismatch_in_a_graph_ends_the_engines_and_what_is_in_flight() -> None:
    with running(2) as engines:
        def work(rank: int, engine: Engine) -> None:
            half_done = submit(engine, f"only on {rank}", np.ones(1))
            request = dataclasses.replace(
                allreduce_request("a", specs_of([np.ones(1 + rank)]), ScaledOp(ReduceOp.SUM)), in_graph=True)
            with pytest.raises(MismatchError, match=r"^a: the ranks disagree on shape: \(1,\) on ranks \[0\]; "):
                engine.submit(request, [np.ones(1 + rank)]).wait(LONG_S)
            for name in ("again", f"only on {rank}"):
                with pytest.raises(EngineError, match=r"^a: the ranks disagree on .* the engine has ended"):
                    submit(engine, name, np.ones(1))
            with pytest.raises(EngineError, match=r"^a: the ranks disagree on .* the engine has ended"):
                half_done.wait(LONG_S)

        on_all(engines, work)


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 18])
def test_after_the_end_the_threads_are_gone_and_work_is_refused(size: int) -> None:
    before = threading.active_count()
    with running(size) as engines:
        on_all(engines, lambda rank, engine: submit(engine, "a", np.ones(1)).wait(LONG_S))
    assert threading.active_count() == before
    for engine in engines:
        assert engine.controller.life.error is None
        with pytest.raises(ShutdownError) as caught:
            submit(engine, "b", np.ones(1))
        assert str(caught.value) == SHUT_DOWN_TEXT


def test_a_rank_that_ends_early_fails_what_others_wait_for() -> None:
    with running(2) as engines:
        on_all(engines, lambda rank, engine: submit(engine, "step", np.ones(1)).wait(LONG_S))
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(engines[1].end)
            with pytest.raises(ShutdownError, match=r"^step: ranks \[0\] wait for ranks \[1\], which have already shut "
                                                    r"down \(after 1 operations\)\. They ended early .*, or a "
                                                    r"collective is under `if rank\(\) == 0` .*, or the ranks ran"):
                submit(engines[0], "step", np.ones(1)).wait(LONG_S)
            ended.result(LONG_S)
    assert all(isinstance(engine.controller.life.error, ShutdownError) for engine in engines)


def test_a_rank_that_has_ended_waits_for_the_others_and_reports_it() -> None:
    reports: list[float] = []
    reported = threading.Event()

    def report(waited_s: float) -> None:
        reports.append(waited_s)
        reported.set()

    with running(2) as engines, ThreadPoolExecutor(1) as other:
        ended = other.submit(engines[0].end, report, 0.001)
        assert reported.wait(LONG_S)
        assert not ended.done()
        engines[1].end()
        ended.result(LONG_S)
    assert reports == sorted(reports)


def test_work_in_flight_is_done_before_the_end() -> None:
    with running(3) as engines:
        handles = [submit(engine, f"{i}", np.ones(2)) for engine in engines for i in range(20)]
    for handle in handles:
        np.testing.assert_array_equal(handle.wait(0)[0], [3, 3])


# -- Ctrl-C and signal handlers ---------------------------------------------------------------------------------------


def ctrl_c() -> None:
    raise KeyboardInterrupt


def interrupted_after_calls(function: Callable[[], object], codes: Sequence[CodeType],
                            handler: Callable[[], object] = ctrl_c) -> Iterator[bool]:
    """Call `function` again and again, each time interrupted after the next call that one of `codes` makes.

    Python calls signal handlers after calls. Yields whether there was an interrupt; the last time there is none.
    """
    operations = {code: {operation.offset: operation.opname for operation in dis.get_instructions(code)}
                  for code in codes}
    for skipped in itertools.count():
        calls, follows_call, has_interrupted = 0, False, False

        def trace(frame: FrameType, event: str, argument: object) -> Callable | None:
            nonlocal calls, follows_call, has_interrupted
            if frame.f_code not in operations or has_interrupted:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                if follows_call:
                    calls += 1
                    if calls > skipped:  # noqa: B023 - the function is gone before the next round
                        has_interrupted = True
                        handler()
                        return None
                follows_call = operations[frame.f_code][frame.f_lasti].startswith("CALL")
            return trace

        previous = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 sends opcodes only after some frame has asked for them.
        sys.settrace(trace)
        try:
            function()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(previous)
        yield has_interrupted
        if not has_interrupted:
            return


def test_an_interrupt_at_any_time_leaves_the_engine_to_others() -> None:
    engines: list[Engine] = []
    array = np.ones(3)

    def run() -> None:
        group = ThreadGroup(1)
        engines.append(make_engine(0, 1, group.control(0), group.data(0), Settings()))
        engines[-1].run(allreduce_request("a", specs_of([array]), ScaledOp(Sum)), [array])

    interrupts = list(interrupted_after_calls(run, [Engine.run.__code__]))
    assert sum(interrupts) > 5
    assert not any(engine._driving.locked() for engine in engines)
    assert threading.get_ident() not in drivers


def test_a_signal_handler_may_call_a_collective_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal_handlers, "_next_look_at", -math.inf)
    results: list[Handle] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with running(1) as (engine,):
            codes = [function.__code__ for function in (
                Engine.run, Engine._put, Engine._call_background, signal_handlers.WakeUp.set, TensorQueue.put_later,
                Handle.await_done)]
            interrupts = list(interrupted_after_calls(
                lambda: results.append(run(engine, "in the loop", np.ones(3), limit_s=math.inf)), codes,
                lambda: results.append(run(engine, "in the handler", np.ones(3), limit_s=math.inf))))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sum(interrupts) > 15
    assert len(results) == sum(interrupts) + len(interrupts)
    assert all(handle.wait(0)[0][0] == 1 for handle in results)


@pytest.mark.parametrize("waits", ["run", "wait", "shutdown"])
def test_a_collective_inside_of_a_cycle_of_its_thread_is_an_error_and_no_hang(waits: str) -> None:
    """A finalizer may interrupt any thread. The error ends the engine, unless the finalizer catches it."""
    class Interrupted(ThreadData):
        def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
            if waits == "run":
                run(engine, "in the handler", np.ones(1))
            elif waits == "wait":
                submit(engine, "in the handler", np.ones(1)).wait(LONG_S)
            else:
                mpistrat.shutdown()

    group = ThreadGroup(1)
    engine = make_engine(0, 1, group.control(0), Interrupted(group, 0), Settings())
    name = r"shutdown\(\)" if waits == "shutdown" else "in the handler"
    with pytest.raises(EngineError, match=f"InvalidRequestError.*{name}: called by a signal handler .* Only set a flag "
                                          f"there, and call {name} in the training loop"):
        run(engine, "in the loop", np.ones(1)).wait(LONG_S)


@pytest.mark.parametrize("rank", [0, 1, 17])
def test_a_rank_that_fails_sees_that_its_last_message_leaves(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ByHand(18)
    control, events = job.engines[rank].controller.control, []
    send = control.send
    monkeypatch.setattr(control, "send", lambda other, message: (events.append(other), send(other, message)))
    monkeypatch.setattr(control, "flush", lambda ranks, limit_s: events.append((sorted(ranks), limit_s > 0)))
    job.engines[rank].controller.life.fail(RuntimeError("broken"))
    neighbours = {0: list(range(1, 17)), 1: [0, 17], 17: [1]}[rank]
    assert sorted(events[:-1]) == neighbours
    assert events[-1] == (neighbours, True)
