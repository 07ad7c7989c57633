"""Deadlocks as the coordinators see them: all ranks are blocked, and nothing is complete."""

import dataclasses
from collections import Counter

import pytest

from mpistrat.core.tuning import FAN_OUT
from mpistrat.negotiation.blocked import BlockedRanks
from mpistrat.negotiation.messages import EndReason
from mpistrat.negotiation.tree import Node, parent_of

from .test_coordinator import Job, allreduce

SIZES = [2, 3, 18, 40, 300]
A, B = allreduce("a"), allreduce("b")


class BlockingJob(Job):
    """With ranks that are blocked."""

    def block(self, *ranks: int) -> None:
        """These ranks can do nothing before the next decision."""
        for rank in ranks:
            self.nodes[rank].set_blocked(True)

    def block_all(self, but: int | None = None) -> None:
        """All ranks, but for one, can do nothing."""
        self.block(*(rank for rank in range(self.size) if rank != but))

    def crossed(self, odd: int) -> None:
        """All ranks submit A, but for one, which submits B."""
        self.submit_all(A, but=[odd])
        self.submit(odd, B)
        self.settle()


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_all_wait_for_each_other_end_at_once(size: int) -> None:
    job = BlockingJob(size)
    job.crossed(odd=size - 1)
    job.block_all()
    job.settle(1.0)
    end, text = job.end()
    assert end is EndReason.DEADLOCK
    assert text.startswith("This is a deadlock: every rank waits for a collective that another rank cannot reach. ")
    assert f" wait for ranks [{size - 1}], which wait for b instead." in text
    assert f"b: ranks [{size - 1}] wait for ranks [" in text
    assert "], which wait for a instead." in text
    assert "hvd.shard(x, y)" in text and "`if rank == 0`" in text


@pytest.mark.parametrize(("size", "odd", "free"), [
    (2, 1, 0), (2, 1, 1), (3, 0, 2), (18, 17, 17), (18, 17, 1), (18, 0, 17), (300, 290, 299), (300, 5, 18),
    (300, 5, 0)])
def test_one_rank_that_may_go_on_is_enough_for_no_deadlock(size: int, odd: int, free: int) -> None:
    job = BlockingJob(size)
    job.crossed(odd)
    job.block_all(but=free)
    for now in (1.0, 10.0, 59.0):
        job.settle(now)
        assert job.end()[0] is None
    job.block(free)
    job.settle(59.5)
    assert job.end()[0] is EndReason.DEADLOCK


@pytest.mark.parametrize("back", [0, 1, 17, 39])
def test_a_rank_that_submits_again_is_blocked_no_more(back: int) -> None:
    job = BlockingJob(40)
    job.crossed(odd=20)
    job.block_all(but=38)
    job.settle(1.0)
    job.submit(back, allreduce("c"))
    job.settle(2.0)
    job.block(38)
    job.settle(3.0)
    assert job.end()[0] is None
    job.block(back)
    job.settle(4.0)
    assert job.end()[0] is EndReason.DEADLOCK
    assert f"c: ranks [{back}] wait for ranks [" in job.end()[1]


@pytest.mark.parametrize("back", [0, 1, 17, 39])
def test_a_rank_on_which_something_happens_takes_it_back(back: int) -> None:
    job = BlockingJob(40)
    job.crossed(odd=20)
    job.block_all(but=38)
    job.settle(1.0)
    job.nodes[back].set_blocked(False)
    job.settle(2.0)
    job.block(38)
    job.settle(3.0)
    assert job.end()[0] is None
    job.block(back)
    job.settle(4.0)
    assert job.end()[0] is EndReason.DEADLOCK


@pytest.mark.parametrize("late", [1, 17, 39])
def test_a_decision_that_has_not_arrived_may_make_a_rank_go_on(late: int) -> None:
    job = BlockingJob(40)
    job.crossed(odd=20)
    job.submit(late, allreduce("step"))
    job.block(late)  # Before the decision on this step, and in vain: rank 0 decides on it now.
    job.submit_all(allreduce("step"), but=[late])
    on_the_way = [late, *(rank for rank in range(40) if parent_of(rank) == late)]
    while sum(job.turn(rank) for rank in reversed(range(40)) if rank not in on_the_way or not job.executed[0]):
        pass
    assert [request.name for request in job.executed[0]] == ["step"]
    assert not job.executed[late]
    job.block(*(rank for rank in range(40) if rank not in on_the_way))
    while sum(job.turn(rank) for rank in reversed(range(40)) if rank not in on_the_way):
        pass
    assert not job.ends[0]
    job.settle()
    assert job.agreed == ["step"]
    assert job.end()[0] is None
    job.block(*on_the_way)
    job.settle()
    assert job.end()[0] is EndReason.DEADLOCK


def test_what_makes_a_request_complete_comes_before_the_news_that_its_rank_is_blocked() -> None:
    job = BlockingJob(18)
    job.submit_all(A, but=[17])
    job.settle()
    job.block_all(but=17)
    job.submit(17, A)
    job.block(17)
    job.settle()
    assert job.agreed == ["a"]
    assert job.end()[0] is None


def test_ranks_that_wait_for_nothing_are_no_deadlock() -> None:
    job = BlockingJob(3)
    job.block_all()
    job.settle(1.0)
    assert job.end()[0] is None


def test_a_rank_that_has_ended_while_others_wait_for_each_other() -> None:
    # What it has submitted is no reason to wait for it, so that the other reason to end does not apply.
    job = BlockingJob(3)
    job.submit_all(A, but=[0])
    job.submit_all(B, but=[1])
    job.nodes[2].end(0)
    job.settle()
    assert job.end()[0] is None
    job.block_all()
    job.settle()
    assert job.end()[0] is EndReason.DEADLOCK


@pytest.mark.parametrize("in_graph", [(True, True), (True, False), (False, True)])
def test_if_a_graph_waits_the_ranks_have_longer(in_graph: tuple[bool, bool]) -> None:
    job = BlockingJob(2)
    for rank, request in enumerate((A, B)):
        job.submit(rank, dataclasses.replace(request, in_graph=in_graph[rank]))
    job.settle()
    job.block_all()
    for now in (1.0, 5.0, 10.9):
        job.settle(now)
        assert job.end()[0] is None
    job.nodes[1].set_blocked(False)
    job.settle(11.0)
    job.block(1)
    for now in (11.5, 21.0):
        job.settle(now)
        assert job.end()[0] is None
    job.settle(21.5)
    assert job.end()[0] is EndReason.DEADLOCK


# -- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [18, 300])
def test_ranks_that_wait_for_a_slow_one_send_one_short_message_each(size: int) -> None:
    job = BlockingJob(size)
    job.submit_all(A, but=[0])
    job.settle()
    job.forget_messages()
    for now in (1.0, 2.0, 20.0):
        job.block_all(but=0)
        job.settle(now)
    assert Counter(rank for rank, _, _ in job.announcements) == dict.fromkeys(range(1, size), 1)
    assert all(message.blocked == 0 and not message.requests for _, message, _ in job.announcements)
    assert max(length for _, _, length in job.announcements) < 20
    job.forget_messages()
    job.submit(0, A)
    job.settle(21.0)
    assert job.agreed == ["a"]
    assert not job.announcements


def test_incomplete_requests_are_passed_on_once_and_only_from_blocked_subtrees() -> None:
    job = BlockingJob(300)
    job.crossed(odd=290)  # under 18, which is under 1
    job.forget_messages()
    job.block_all(but=1)
    job.settle(1.0)
    job.settle(2.0)
    with_requests = [rank for rank, message, _ in job.announcements if message.requests]
    assert with_requests == [18]
    assert all(message.blocked == 0 for _, message, _ in job.announcements)


def test_a_number_is_taken_back_only_while_it_is_the_latest() -> None:
    ranks = BlockedRanks(Node(1, 2))
    assert ranks.to_send() == (None, False)
    ranks.note(1, 0)
    assert ranks.to_send() == (0, True)
    ranks.sent(0)
    assert ranks.to_send() == (0, False)
    ranks.note(1, None)
    assert ranks.to_send() == (None, True)
    ranks.decisions += 1
    assert ranks.to_send() == (None, False)


def test_a_source_counts_only_with_the_latest_number() -> None:
    ranks = BlockedRanks(Node(0, FAN_OUT + 2))
    ranks.decisions = 5
    for source in range(FAN_OUT + 1):
        assert not ranks.has_all_ranks
        ranks.note(source, 5)
    assert ranks.has_all_ranks
    ranks.note(3, 4)
    assert not ranks.has_all_ranks
