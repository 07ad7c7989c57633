"""Votes: the agreement, what a rank votes for, and engines on threads that agree by votes or fall back to messages."""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mpistrat.core.errors import EngineError, MismatchError, ShutdownError, StallError
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.interfaces import Outcome
from mpistrat.core.request import Average, ScaledOp, Sum, allreduce_request, barrier_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.engine.engine import Engine
from mpistrat.negotiation.fast_path import FastPath
from mpistrat.transport.local import LocalAgreement
from mpistrat.transport.shm.segment import SharedMemoryAgreement
from tests.support.thread_group import ThreadGroup

from ..support.engines import LONG_S, ByHand, make_engine, on_all, run, running
from ..support.shared_memory_of_threads import shared_memory_planes


def agreements(size: int) -> list[SharedMemoryAgreement]:
    group = ThreadGroup(size)
    return [group.agreement(rank) for rank in range(size)]


# -- the agreement ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("votes, ready, expected", [
    ((5, 5, 5), (True, True, True), Outcome.ALL_READY), ((5, 5, 5), (True, False, True), Outcome.AGREED),
    ((2**61 - 1,) * 3, (False, False, False), Outcome.AGREED), ((5, 5, 6), (True, True, True), Outcome.REFUSED),
    ((5, 0, 5), (False, False, False), Outcome.REFUSED), ((0, 0, 0), (True, True, True), Outcome.REFUSED)])
def test_all_ranks_must_vote_for_the_same_and_hear_whether_all_are_ready(
        votes: tuple[int, ...], ready: tuple[bool, ...], expected: Outcome) -> None:
    ranks = agreements(3)
    for agreement, vote, is_ready in zip(ranks, votes, ready, strict=True):
        assert agreement.outcome() is None
        agreement.vote(vote, is_ready)
    assert [agreement.outcome() for agreement in ranks] == [expected] * 3


def test_there_is_no_outcome_before_all_have_voted() -> None:
    first, second = agreements(2)
    assert (first.has_voted, first.has_news(), second.has_news()) == (False, False, False)
    first.vote(1)
    assert first.outcome() is None
    assert second.outcome() is None
    assert (first.has_voted, first.has_news(), second.has_news()) == (True, False, False)
    assert first.missing() == [1]
    second.vote(1)
    assert first.has_news() and second.has_news()
    assert first.outcome() and second.outcome()
    assert (first.has_voted, second.has_voted) == (False, False)


def test_a_rank_that_is_ahead_does_not_change_the_outcome_for_the_others() -> None:
    first, second, third = agreements(3)
    for agreement in (first, second, third):
        agreement.vote(7)
    assert first.outcome()
    first.vote(8)
    assert second.outcome()
    second.vote(9)
    assert third.outcome()
    third.vote(8)
    assert [agreement.outcome() for agreement in (first, second, third)] == [False] * 3


def test_ranks_that_may_sleep_are_called() -> None:
    group = ThreadGroup(3)
    ranks = [group.agreement(rank) for rank in range(3)]
    ranks[1].vote(4)
    assert [event.wait(0.0) for event in group.wake_events] == [True, False, True]


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_come_to_the_same_outcomes(size: int) -> None:
    def vote(agreement: SharedMemoryAgreement) -> list[bool | None]:
        chance, outcomes = random.Random(id(agreement)), []
        for _ in range(300):
            agreement.vote(chance.choice([3, 3, 3, 4]))
            while (outcome := agreement.outcome()) is None:
                time.sleep(0)
            outcomes.append(outcome)
        return outcomes
    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(vote, agreements(size))
    assert all(other == first for other in others)
    assert {True, False} == set(first)


def test_a_fingerprint_stands_for_what_is_compared() -> None:
    specs = specs_of([np.ones(3, np.float32)])
    first = allreduce_request("a", specs, ScaledOp(Sum, 1.0, 0.5), labels=("w",))
    assert first.fingerprint == allreduce_request("a", specs, ScaledOp(Sum, 1.0, 0.5), labels=("v",)).fingerprint
    others = [allreduce_request("b", specs, ScaledOp(Sum, 1.0, 0.5)),
              allreduce_request("a", specs, ScaledOp(Average, 1.0, 0.5)),
              allreduce_request("a", specs, ScaledOp(Sum, 0.5, 0.5)), allreduce_request("a", specs, ScaledOp(Sum)),
              allreduce_request("a", specs_of([np.ones(3)]), ScaledOp(Sum, 1.0, 0.5)),
              allreduce_request("a", specs, ScaledOp(Sum, 1.0, 0.5), layout=((0,),)),
              dataclasses.replace(first, wire_dtype="float16"), dataclasses.replace(first, device="gpu")]
    assert len({request.fingerprint for request in (first, *others)}) == 9


# -- what a rank votes for --------------------------------------------------------------------------------------------


def entry(name: str) -> Entry:
    return Entry(barrier_request(name), [], Handle(name))


def voters(warning_s: float | None = None, abort_s: float | None = None) -> list[FastPath]:
    """Those of two ranks, in a vote that has just been called."""
    made = [FastPath(agreement, Topology(rank, ("here", "here")), warning_s, abort_s)
            for rank, agreement in enumerate(agreements(2))]
    for voting in made:
        voting.open()
    return made


def test_what_all_propose_is_agreed_on_and_the_vote_goes_on() -> None:
    first, second = voters()
    for name in "ab":
        ours, theirs = entry(name), entry(name)
        first.vote(ours, False, 0.0)
        assert first.settle() == (None, None)
        assert first.is_waiting and first.has_voted
        second.vote(theirs, False, 0.0)
        assert second.settle() == (theirs, Outcome.AGREED)
        assert first.settle() == (ours, Outcome.AGREED)
        assert not first.is_waiting and not first.has_voted
    assert first.is_open and second.is_open


@pytest.mark.parametrize("theirs", [entry("b"), None], ids=["another", "against"])
def test_a_vote_for_another_operation_or_against_comes_back_and_ends_the_vote(theirs: Entry | None) -> None:
    first, second = voters()
    ours = entry("a")
    first.vote(ours, False, 0.0)
    if theirs is None:
        second.decline(0.0)
        second.decline(0.0)
    else:
        second.vote(theirs, False, 0.0)
    assert first.settle() == (ours, Outcome.REFUSED)
    assert second.settle() == (theirs, Outcome.REFUSED)
    assert not first.is_open and not second.is_open
    first.decline(0.0)
    assert not first.has_voted  # No vote has been called.


def test_the_log_has_the_begin_and_the_end_of_votes_with_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        first, second = (FastPath(agreement, Topology(i, ("here", "here"), (3, 5)), None, None)
                         for i, agreement in enumerate(agreements(2)))
        for voting in (first, second):
            voting.open()
        for name in ("a", "b"):
            first.vote(entry("a"), False, 0.0)
            assert first.is_late(1.0)
            second.vote(entry(name), False, 0.0)
            first.settle()
            second.settle()
    late = "rank 3: no outcome after 1.00 s; rank 0 is asked to end the vote"
    end = "the vote of the fast path ends after 1 operations; rank 0 skips 0 chances before the next one"
    begin = "a vote of the fast path begins"
    assert caplog.messages == [f"rank 3: {begin}", f"rank 5: {begin}", late, late, f"rank 3: {end}", f"rank 5: {end}"]


def test_the_log_has_the_place_of_a_rank_in_the_tree(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        Steps(3)
    assert caplog.messages == [
        f"rank {rank} of 3: negotiates with parent {parent} and children {children} of the tree; votes are on"
        for rank, parent, children in ((0, None, [1, 2]), (1, 0, []), (2, 0, []))]


def test_a_vote_that_is_not_answered_is_to_be_ended_once() -> None:
    first, second = voters()
    assert not first.is_late(1e6)
    first.vote(entry("a"), False, 0.0)
    second.decline(0.0)
    assert [first.is_late(now) for now in (0.03, 0.05, 0.06)] == [False, True, False]
    assert second.is_late(0.05)
    first.settle()
    first.open()
    first.vote(entry("a"), False, 1.0)
    assert first.is_late(1.05)


def test_votes_that_end_in_the_first_round_are_called_ever_more_rarely() -> None:
    first, second = voters()

    def vote(*what: str) -> None:
        for voting in (first, second):
            voting.open()
        for name in what:
            first.vote(entry("a"), False, 0.0)
            second.vote(entry(name), False, 0.0)
            first.settle()
            second.settle()
    skipped = []
    for _ in range(9):
        vote("b")
        skipped.append(next(count for count in range(1000) if first.is_worth_opening()))
    assert skipped == [1, 3, 7, 15, 31, 63, 64, 64, 64]
    vote("a", "b")
    assert first.is_worth_opening()


def test_a_rank_whose_engine_does_not_run_is_named(caplog: pytest.LogCaptureFixture) -> None:
    first, _ = voters(warning_s=60.0, abort_s=600.0)
    first.check(1e6)
    first.vote(entry("a"), False, 0.0)
    first.check(59.0)
    assert not caplog.messages
    first.check(61.0)
    first.check(100.0)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("a: rank 0 has waited 61 s for ranks [1]. The engine of at least one")
    first.check(130.0)
    assert len(caplog.messages) == 2
    with pytest.raises(StallError, match=r"a: rank 0 has waited 601 s for ranks \[1\]"):
        first.check(601.0)


def test_one_rank_of_each_host_looks_at_those_of_its_host_that_miss(caplog: pytest.LogCaptureFixture) -> None:
    hosts = ("a", "a", "a", "b", "b")
    voting = [FastPath(round_of_rank, Topology(rank, hosts), 60.0, None)
              for rank, round_of_rank in enumerate(agreements(5))]
    for rank in 0, 2, 4:
        voting[rank].look = lambda late, rank=rank: f"\n{rank} looks at {late}"
        voting[rank].open()
        voting[rank].vote(entry("x"), False, 0.0)
    for rank in 0, 2, 4:
        voting[rank].check(61.0)
    assert [message.partition("\n")[2] for message in caplog.messages] == ["0 looks at 1", "", "4 looks at 3"]


def test_a_vote_that_another_host_does_not_answer_may_be_for_the_network() -> None:
    first = FastPath(agreements(2)[0], Topology(0, ("here", "there")), None, 5.0)
    first.open()
    first.vote(entry("a"), False, 0.0)
    with pytest.raises(StallError, match=r"^a: rank 0 on here has waited 5 s for ranks \[1\] on there\. Either the "
                                         "network between the hosts here and there is down"):
        first.check(5.0)


def test_a_rank_whose_engine_does_not_run_ends_the_wait_in_time() -> None:
    first, _ = voters(abort_s=5.0)
    first.decline(0.0)
    first.check(4.9)
    with pytest.raises(StallError, match=r"rank 0 has waited 5 s for ranks \[1\]"):
        first.check(5.0)


def test_without_stall_checks_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    first, _ = voters()
    first.vote(entry("a"), False, 0.0)
    first.check(1e6)
    assert not caplog.messages


# -- engines ----------------------------------------------------------------------------------------------------------


def test_what_ranks_wait_for_alike_takes_no_message_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int, engine: Engine) -> list[float]:
        return [float(run(engine, f"{i % 3}", np.array(float(i + rank)), np.ones(5)).wait(LONG_S)[0])
                for i in range(30)]

    sent: list[int] = []
    # A background thread might just be looking for messages when a caller wants to drive.
    with running(3, start=False) as engines:
        for rank, engine in enumerate(engines):
            control = engine.controller.control
            monkeypatch.setattr(control, "send", lambda *message, rank=rank, send=control.send: (
                sent.append(rank), send(*message)))
        assert on_all(engines, work) == [[3.0 * i + 3 for i in range(30)]] * 3
        assert sorted(sent) == [0, 0, 1, 2]


@contextlib.contextmanager
def sharing_memory(size: int, start: bool = True) -> Iterator[list[Engine]]:
    """As `running`, with data planes over shared memory."""
    group = ThreadGroup(size, LONG_S)
    planes = shared_memory_planes(list(range(size)), [4096], [group.data(rank) for rank in range(size)], LONG_S)
    with running(size, planes=planes, group=group, start=start) as engines:
        yield engines


def test_ranks_may_wait_in_another_order_in_other_threads() -> None:
    def work(rank: int, engine: Engine) -> list[list[float]]:
        def one(thread: int) -> list[float]:
            chance, results = random.Random(f"{rank} {thread}"), []
            for i in range(40):
                if chance.random() < 0.1:
                    time.sleep(0.002 * chance.random())
                call = engine.run if chance.random() < 0.7 else engine.submit
                array = np.array(float(i + thread))
                results.append(float(call(allreduce_request(f"{thread}", specs_of([array]), ScaledOp(Sum)), [array])
                                     .wait(LONG_S)[0]))
            return results
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(one, range(3)))

    with sharing_memory(3) as engines:
        assert on_all(engines, work) == [[[3.0 * (i + thread) for i in range(40)] for thread in range(3)]] * 3


def test_what_was_packed_while_a_rank_waited_is_reduced_only_if_all_agree() -> None:
    def work(rank: int, engine: Engine) -> list[object]:
        results: list[object] = []
        for step in range(60):
            if step % 3 == rank:
                time.sleep(0.001)  # The others wait, and pack.
            rows = 7 if step % 10 == 9 and rank == 2 else 3000
            if step % 7 == 6 and rank == 1:
                extra = engine.submit(allreduce_request("b", specs_of([np.ones(5)]), ScaledOp(Sum)), [np.ones(5)])
            try:
                results.append(float(run(engine, "a", np.full(rows, float(step + rank))).wait(LONG_S)[0][-1]))
            except MismatchError:
                results.append("mismatch")
            if step % 7 == 6:
                handle = extra if rank == 1 else run(engine, "b", np.ones(5))
                results.append(float(handle.wait(LONG_S)[0][0]))
        return results
    expected: list[object] = []
    for step in range(60):
        expected.append("mismatch" if step % 10 == 9 else 3.0 * step + 3)
        if step % 7 == 6:
            expected.append(3.0)
    with sharing_memory(3) as engines:
        assert on_all(engines, work) == [expected] * 3


@pytest.mark.parametrize("all_ready", [True, False])
def test_what_was_prepared_is_executed_whether_all_ranks_know_of_it_or_not(all_ready: bool) -> None:
    with sharing_memory(2, start=False) as engines:
        executors = [engine.controller.executor for engine in engines]
    entries = [Entry(allreduce_request("a", specs_of([array]), ScaledOp(Sum)), [array], Handle("a"))
               for array in (np.full(9, 1.0), np.full(9, 2.0))]
    assert all(executor.prepare(entry) for executor, entry in zip(executors, entries, strict=True))
    for executor in executors:
        executor.execute([])

    def finish(rank: int) -> float:
        executors[rank].execute([entries[rank]], all_ready)
        return float(entries[rank].handle.wait(0)[0][0])
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(finish, range(2))) == [3.0, 3.0]


def test_an_operation_that_was_ready_and_is_no_longer_is_an_error() -> None:
    with sharing_memory(2, start=False) as engines:
        executor = engines[0].controller.executor
    array = np.ones(9)
    requests = [allreduce_request(name, specs_of([array]), ScaledOp(Sum)) for name in "ab"]
    entry, other = (Entry(request, [array], Handle(request.name)) for request in requests)
    assert executor.prepare(entry)
    assert executor.prepare(other)
    with pytest.raises(EngineError, match="a: all ranks have voted that they are ready, but this rank is not"):
        executor.execute([entry], all_ready=True)


def open_vote(engines: Sequence[Engine]) -> None:
    """Let all ranks wait for an operation, after which they vote for the next."""
    on_all(engines, lambda rank, engine: run(engine, "first", np.ones(1)))
    assert all(engine.controller._fast_path.is_open for engine in engines)


def test_a_rank_that_never_comes_is_reported_by_the_first() -> None:
    with running(2, Settings(stall_warning_s=0.2, stall_abort_s=0.4)) as engines:
        open_vote(engines)
        with pytest.raises(StallError, match=r"a: ranks \[1\] have waited"):
            run(engines[1], "a", np.ones(1)).wait(LONG_S)


def test_a_rank_that_has_ended_is_named_to_one_that_votes() -> None:
    with running(2) as engines:
        open_vote(engines)
        engines[1].announce_end()
        with pytest.raises(ShutdownError, match=r"ranks \[0\] wait for ranks \[1\].*\(after 1 operations\)"):
            run(engines[0], "a", np.ones(1)).wait(LONG_S)


def test_a_vote_that_stands_when_its_rank_fails_keeps_nobody_waiting() -> None:
    with running(2) as engines:
        open_vote(engines)
        pending = run(engines[0], "a", np.ones(1), limit_s=0.0)
        for engine in engines:
            engine.abandon("ranks [1] have died")
        with pytest.raises(EngineError, match="have died"):
            pending.wait(LONG_S)


class Steps(ByHand):
    """Engines without a thread, which run cycles when `step` is called."""

    def put(self, rank: int, name: str, is_awaited: bool) -> Handle:
        handle = Handle(name)
        self.controllers[rank].queue.put(Entry(barrier_request(name), [], handle, is_awaited))
        return handle

    def step(self, *ranks: int, times: int = 3) -> None:
        """A few cycles of these ranks, or of all."""
        for _ in range(times):
            for rank in ranks or range(len(self.controllers)):
                self.controllers[rank].run_cycle()

    def is_open(self) -> list[bool]:
        return [c._fast_path.is_open for c in self.controllers]

    def open_vote(self) -> None:
        for rank in range(len(self.controllers)):
            self.put(rank, "first", is_awaited=True)
        self.step()
        assert all(self.is_open())

    def vote_of_the_first(self) -> Handle:
        """In a vote that is open, rank 0 votes for "a", and waits."""
        self.open_vote()
        handle = self.put(0, "a", is_awaited=True)
        self.step(0)
        return handle


@pytest.mark.parametrize("is_awaited", [True, False])
def test_the_first_rank_calls_a_vote_only_after_what_it_has_awaited(is_awaited: bool) -> None:
    ranks = Steps(2)
    handles = [ranks.put(0, "a", is_awaited), ranks.put(1, "a", not is_awaited)]
    ranks.step()
    assert all(handle.is_done for handle in handles)
    assert ranks.is_open() == [is_awaited] * 2


def test_nobody_calls_a_vote_after_one_of_two_operations() -> None:
    ranks = Steps(2)
    for rank in range(2):
        ranks.put(rank, "a", is_awaited=True)
    ranks.put(0, "b", is_awaited=False)
    ranks.step()
    assert ranks.is_open() == [False, False]


def test_a_rank_with_something_else_to_do_votes_against() -> None:
    ranks = Steps(2)
    ours = ranks.vote_of_the_first()
    assert not ours.is_done
    theirs = ranks.put(1, "a", is_awaited=False)
    ranks.step()
    assert ours.is_done and theirs.is_done


def test_a_rank_that_still_has_something_to_do_when_a_vote_is_called_votes_against() -> None:
    ranks = Steps(2)
    ranks.put(0, "first", is_awaited=True)
    for name in ("first", "b"):
        ranks.put(1, name, is_awaited=True)
    ranks.step()
    ours = ranks.put(0, "a", is_awaited=True)
    ranks.step()
    assert not ours.is_done
    assert ranks.is_open() == [False, False]
    handles = [ranks.put(0, "b", is_awaited=True), ranks.put(1, "a", is_awaited=True)]
    ranks.step()
    assert ours.is_done and all(handle.is_done for handle in handles)


def test_a_decision_waits_until_the_vote_has_ended() -> None:
    ranks = Steps(3)
    ours = ranks.vote_of_the_first()
    ranks.controllers[0]._coordinator.request_vote_end()
    ranks.step(0, 1)
    assert ranks.is_open() == [True] * 3  # Rank 2 has not heard of it, so nobody knows how it votes.
    assert [len(c._learned) for c in ranks.controllers] == [1, 1, 0]
    ranks.step(2)
    ranks.step()
    assert ranks.is_open() == [False] * 3
    assert not ours.is_done
    handles = [ranks.put(rank, "a", is_awaited=True) for rank in (1, 2)]
    ranks.step()
    assert ours.is_done and all(handle.is_done for handle in handles)


def test_a_decision_is_sent_on_only_when_those_before_it_have_been_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child in the collective of one decision does not read the next, which may be larger than its ring."""
    ranks = Steps(2)
    ranks.open_vote()
    control, events = ranks.controllers[0].control, []
    send, flush = control.send, control.flush
    monkeypatch.setattr(control, "send", lambda rank, message: (events.append("send"), send(rank, message)))
    monkeypatch.setattr(control, "flush", lambda children: (events.append("flush"), flush(children)))
    with monkeypatch.context() as patch:
        patch.setattr(ranks.controllers[0]._fast_path._agreement, "outcome", lambda: None)
        for name in ("a", "b"):
            for rank in range(2):
                ranks.put(rank, name, is_awaited=False)
            ranks.step()
        assert len(ranks.controllers[0]._learned) == 2
        assert events == ["send"]
    ranks.step()
    assert events == ["send", "flush", "send", "flush"]


def test_what_all_vote_for_while_a_decision_waits_is_executed_before_it() -> None:
    ranks = Steps(2)
    ours = ranks.vote_of_the_first()
    ranks.controllers[0]._coordinator.request_vote_end()
    ranks.step(0)
    theirs = ranks.put(1, "a", is_awaited=True)
    controller = ranks.controllers[1]
    assert controller.may_propose
    entry, = controller.queue.take_new()
    controller._fast_path.vote(entry, controller.executor.prepare(entry), 0.0)
    ranks.step()
    assert ours.is_done and theirs.is_done
    assert ranks.is_open() == [False, False]


def test_a_rank_that_fails_is_heard_of_while_a_vote_is_open() -> None:
    ranks = Steps(2)
    pending = ranks.vote_of_the_first()
    ranks.controllers[1].life.fail(RuntimeError("broken"))
    ranks.step(0)
    with pytest.raises(EngineError, match="broken"):
        pending.wait(0)


@pytest.mark.parametrize("stalled", [0, 1])
def test_a_stall_of_one_rank_is_a_stall_on_all(stalled: int) -> None:
    ranks = Steps(3)
    pending = [ranks.put(rank, "a", is_awaited=False) for rank in range(2)]
    ranks.step()
    ranks.controllers[stalled].life.fail(StallError("rank 7 does not come"))
    ranks.step(*(rank for rank in range(3) if rank != stalled))
    for handle in pending:
        with pytest.raises(StallError, match="rank 7 does not come"):
            handle.wait(0)
    assert [type(c.life.error) for c in ranks.controllers] == [StallError] * 3


def test_a_parent_that_still_waits_for_the_vote_knows_its_childs_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Steps(18)  # rank 17 reports to rank 1

    def put(name: str, is_awaited: bool = False) -> list[Handle]:
        handles = [ranks.put(rank, name, is_awaited) for rank in range(18)]
        ranks.step()
        return handles
    put("a")  # It gets a number the second time.
    ranks.open_vote()
    with monkeypatch.context() as patch:
        patch.setattr(ranks.controllers[1]._fast_path._agreement, "outcome", lambda: None)
        second = put("a")
        assert [handle.is_done for handle in second] == [rank != 1 for rank in range(18)]
        third = [ranks.put(rank, "a", is_awaited=False) for rank in range(2, 18)]
        ranks.step()
    third += [ranks.put(0, "a", is_awaited=False)]
    ranks.step()
    third += [ranks.put(1, "a", is_awaited=False)]
    ranks.step()
    assert all(handle.is_done for handle in second + third)


def test_one_rank_agrees_with_itself_without_negotiating(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ThreadGroup(1)
    engine = make_engine(0, 1, group.control(0), group.data(0), agreement=LocalAgreement())
    coordinator, negotiated = engine.controller._coordinator, []
    submit = coordinator.submit
    monkeypatch.setattr(coordinator, "submit", lambda request, now: (negotiated.append(request.name),
                                                                    submit(request, now)))
    for name in ("first", "second", "third", "behind"):
        array = np.arange(3.0)
        if name == "behind":  # It must not overtake what is not awaited, which ends the vote.
            waiting = engine.submit(allreduce_request("not awaited", specs_of([array]), ScaledOp(Sum)), [array])
        handle = engine.run(allreduce_request(name, specs_of([array]), ScaledOp(Sum)), [array])
        assert handle.wait(0)[0].tolist() == [0, 1, 2]
    assert waiting.wait(0)[0].tolist() == [0, 1, 2]
    assert negotiated == ["first", "not awaited", "behind"]
