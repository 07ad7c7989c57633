"""The tree of coordinators, driven through the bytes of its messages."""

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import pytest

from mpistrat.core.errors import MessageError, StallError
from mpistrat.core.request import CollectiveType, ReduceOp, Request, ScaledOp, TensorSpec, join_request
from mpistrat.core.topology import Topology
from mpistrat.core.tuning import FAN_OUT
from mpistrat.negotiation.coordinator import Coordinator
from mpistrat.negotiation.messages import Announcement, Decision, EndReason
from mpistrat.negotiation.reports import describe_mismatch, describe_mismatch_in_graph
from mpistrat.negotiation.subtree import Node, subtree

SIZES = [1, 2, 3, 17, 18, 40, 300]
WARNING_S, ABORT_S = 60.0, 600.0
CAPACITY = 1024
TWO = Topology(0, ("", ""))


def allreduce(name: str, *shape: int, dtype: str = "float32", labels: tuple[str, ...] = (),
              **changes: object) -> Request:
    request = Request(CollectiveType.ALLREDUCE, name, (TensorSpec(dtype, shape),), labels=labels)
    return dataclasses.replace(request, **changes)  # type: ignore[arg-type]


def coordinator(rank: int, size: int, *limits: float | None, capacity: int = CAPACITY) -> Coordinator:
    """That of a rank of one host. The limits are those of Coordinator."""
    return Coordinator(Topology(rank, ("",) * size), capacity, *limits)


class Job:
    """The coordinators of all ranks, and the messages between them: bytes that are on their way until delivered."""

    def __init__(self, size: int, capacity: int = CAPACITY, warning_s: float | None = WARNING_S,
                 abort_s: float | None = ABORT_S):
        self.size = size
        self.nodes = [coordinator(rank, size, warning_s, abort_s, capacity=capacity) for rank in range(size)]
        self.mail: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.executed: list[list[Request]] = [[] for _ in range(size)]
        self.errors: list[list[tuple[str, str]]] = [[] for _ in range(size)]
        self.ends: list[list[tuple[EndReason, str]]] = [[] for _ in range(size)]
        self.announcements: list[tuple[int, Announcement, int]] = []
        self.decisions: list[tuple[Decision, int]] = []
        self.now = 0.0

    def submit(self, rank: int, *requests: Request) -> "Job":
        for request in requests:
            self.nodes[rank].submit(request, self.now)
        return self

    def submit_all(self, *requests: Request, but: Iterable[int] = ()) -> "Job":
        for rank in set(range(self.size)) - set(but):
            self.submit(rank, *requests)
        return self

    def turn(self, rank: int, most: int = 10**9) -> bool:
        """One round of a rank's engine, with at most so many messages. Returns whether anything happened."""
        node, mail = self.nodes[rank], self.mail[rank]
        messages = [mail.popleft() for _ in range(min(most, len(mail)))]
        decisions = []
        for source, data in messages:
            if source == node.parent:
                self._send_down(rank, data)
                decisions.append(Decision.from_bytes(data))
            else:
                node.receive(source, data, self.now)
        for decision in decisions:
            self._follow(rank, decision)
        announcement, decided = node.advance(self.now)
        if announcement is not None:
            data = announcement.to_bytes()
            self.announcements.append((rank, announcement, len(data)))
            self.mail[node.parent].append((rank, data))
        if decided is not None:
            data = decided.to_bytes()
            self.decisions.append((decided, len(data)))
            self._send_down(rank, data)
            self._follow(rank, decided)
        return bool(messages or announcement or decided)

    def settle(self, *times: float) -> None:
        """At each of these times, or now, let all ranks act, far ones first, until nothing moves any more."""
        for now in times or (self.now,):
            self.now = now
            while sum(self.turn(rank) for rank in reversed(range(self.size))):
                pass

    def forget_messages(self) -> None:
        self.announcements.clear()
        self.decisions.clear()

    @property
    def agreed(self) -> list[str]:
        """The names that were executed, which must be the same on all ranks."""
        names = [[request.name for request in executed] for executed in self.executed]
        assert all(other == names[0] for other in names)
        return names[0]

    @property
    def mismatches(self) -> list[tuple[str, str]]:
        """The errors, which must be the same on all ranks."""
        assert all(other == self.errors[0] for other in self.errors)
        return self.errors[0]

    def end(self) -> tuple[EndReason | None, str]:
        """Why the engines have ended, if they have, which must be the same on all ranks."""
        assert all(other == self.ends[0] for other in self.ends)
        assert len(self.ends[0]) <= 1
        return self.ends[0][0] if self.ends[0] else (None, "")

    def _send_down(self, rank: int, data: bytes) -> None:
        for child in self.nodes[rank].children:
            self.mail[child].append((rank, data))

    def _follow(self, rank: int, decision: Decision) -> None:
        self.executed[rank] += self.nodes[rank].learn(decision)
        self.errors[rank] += decision.errors
        if decision.end is not None:
            self.ends[rank].append((decision.end, decision.end_text))


def repeated_step(size: int, names: Iterable[str], steps: int = 4, capacity: int = 1024) -> Job:
    """A job that has done the same step several times; its messages are those of the last."""
    job = Job(size, capacity)
    requests = [allreduce(name, 3) for name in names]
    for _ in range(steps):
        job.forget_messages()
        job.submit_all(*requests).settle()
    return job


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_is_the_child_of_its_parent_and_of_no_other(size: int) -> None:
    nodes = [coordinator(rank, size) for rank in range(size)]
    assert sorted(child for node in nodes for child in node.children) == list(range(1, size))
    assert max(len(node.children) for node in nodes) == min(FAN_OUT, size - 1)
    for node in nodes:
        assert (node.parent is None) == (node.rank == 0)
        assert all(nodes[child].parent == node.rank for child in node.children)
        assert set(Node(node.rank, size).neighbours) == {*node.children, node.parent} - {None}


@pytest.mark.parametrize("size", SIZES)
def test_a_subtree_is_a_rank_and_the_subtrees_of_its_children(size: int) -> None:
    nodes = [coordinator(rank, size) for rank in range(size)]
    for node in nodes:
        below = {rank for child in node.children for rank in subtree(child, size)}
        assert set(subtree(node.rank, size)) == {node.rank} | below
        assert list(subtree(node.rank, size)) == sorted(subtree(node.rank, size))
        assert sum(Node(node.rank, size).ranks_under.values()) == 1 + len(below)
    assert list(subtree(0, size)) == list(range(size))


# -- agreement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_name_waits_for_its_last_rank_and_holds_up_no_other(size: int) -> None:
    for last in {0, 1, size // 2, size - 1}:
        job = Job(size)
        job.submit_all(allreduce("late"), but=[last])
        job.submit_all(allreduce("early")).settle()
        assert job.agreed == ["early"]
        job.submit(last, allreduce("late")).settle()
        assert job.agreed == ["early", "late"]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 5, 18, 40])
def test_no_order_of_events_makes_the_ranks_execute_in_different_orders(size: int, seed: int) -> None:
    # Ranks submit at random times, a name again only once it is done; messages are late at random, in order per sender.
    # There are numbers, none, and too few.
    source, job, steps = random.Random(seed), Job(size, capacity=(1024, 0, 3)[seed % 3]), 4
    names = [f"{i}" for i in range(6)]
    done = [Counter[str]() for _ in range(size)]
    submitted = [Counter[str]() for _ in range(size)]
    while any(counts[name] < steps for counts in done for name in names):
        rank = source.randrange(size)
        ready = [n for n in names if submitted[rank][n] == done[rank][n] < steps]
        for name in source.sample(ready, source.randint(0, len(ready))):
            # From the third step on the shape is another one, and the number of the old one is of no use any more.
            # Labels may differ among ranks.
            job.submit(rank, allreduce(name, int(submitted[rank][name] >= 2), labels=(f"of {rank}",)))
            submitted[rank][name] += 1
        job.turn(rank, most=source.randint(0, 3))
        done[rank] = Counter(request.name for request in job.executed[rank])
    assert Counter(job.agreed) == dict.fromkeys(names, steps)
    assert job.mismatches == []


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_request_gets_a_number_the_second_time_and_is_nothing_else_from_then_on(size: int) -> None:
    job = Job(size)
    for expected in [((None, allreduce("a")),), ((0, allreduce("a")),), (0,), (0,)]:
        job.forget_messages()
        job.submit_all(allreduce("a")).settle()
        assert [decision.agreed for decision, _ in job.decisions] == [expected]
    assert all(announcement == Announcement(ids=(0,)) for _, announcement, _ in job.announcements)
    assert len(job.announcements) == size - 1
    assert job.agreed == ["a"] * 4


def test_with_capacity_0_there_are_no_numbers() -> None:
    job = repeated_step(3, ["a", "b"], capacity=0)
    assert [decision.agreed for decision, _ in job.decisions] == [((None, allreduce("a", 3)),
                                                                   (None, allreduce("b", 3)))]
    assert all(not announcement.ids for _, announcement, _ in job.announcements)
    assert job.agreed == ["a", "b"] * 4


def test_no_more_numbers_are_given_than_there_is_room_for() -> None:
    job = Job(3, capacity=2)
    for name in ["a", "a", "b", "b", "c", "c", "c", "a"]:
        job.submit_all(allreduce(name)).settle()
    assert [decision.agreed for decision, _ in job.decisions[-3:]] == [
        ((None, allreduce("c")),), ((None, allreduce("c")),), (0,)]
    assert len(job.agreed) == 8


def test_names_that_are_used_once_take_no_numbers() -> None:
    job = Job(2, capacity=1)
    for step in range(50):
        job.submit_all(allreduce(f"loss/{step}")).settle()
    for _ in range(3):
        job.forget_messages()
        job.submit_all(allreduce("again")).settle()
    assert [decision.agreed for decision, _ in job.decisions] == [(0,)]


def test_another_shape_of_a_numbered_name_travels_in_full_and_the_old_one_keeps_its_number() -> None:
    job = repeated_step(18, ["a"])
    for dimension, expected in ((4, (None, allreduce("a", 4))), (3, 0)):
        job.forget_messages()
        job.submit_all(allreduce("a", dimension)).settle()
        assert [decision.agreed for decision, _ in job.decisions] == [(expected,)]
        assert all(executed[-1] == allreduce("a", dimension) for executed in job.executed)


def test_a_number_is_no_way_around_the_comparison() -> None:
    job = repeated_step(18, ["a"])
    job.submit_all(allreduce("a", 3), but=[17])
    job.submit(17, allreduce("a", 4)).settle()
    assert job.mismatches == [("a", "a: the ranks disagree on shape: (3,) on ranks [0-16]; (4,) on ranks [17].")]
    job.submit_all(allreduce("a", 4))  # The name may be used again.
    job.settle()
    assert job.agreed == ["a"] * 5


# -- what a step costs each rank, in messages and bytes ---------------------------------------------------------------

LARGE = [256, 1024, *(pytest.param(size, marks=pytest.mark.nightly) for size in (4096, 16_384))]
TENSORS = 2  # as many buckets


class Cost(NamedTuple):
    """The most that any rank sends in a step towards rank 0 and receives from below, and the bytes of the decisions."""

    sent: int
    sent_bytes: int
    received: int
    rank_lists: int
    decision_bytes: tuple[int, ...]


@cache
def costs(size: int) -> list[Cost]:
    job = Job(size)
    requests = [allreduce(f"gradient.{i}", 3) for i in range(TENSORS)]
    steps = []
    for _ in range(4):
        job.forget_messages()
        job.submit_all(*requests)
        job.settle()
        sent = Counter(rank for rank, _, _ in job.announcements)
        received = Counter(job.nodes[rank].parent for rank, _, _ in job.announcements)
        lists = sum(ranks is not None for _, message, _ in job.announcements for _, ranks in message.requests)
        steps.append(Cost(max(sent.values()), max(nbytes for _, _, nbytes in job.announcements), max(received.values()),
                          lists, tuple(nbytes for _, nbytes in job.decisions)))
    return steps


@pytest.mark.parametrize("size", LARGE)
def test_a_first_negotiation_costs_a_rank_one_message_and_no_list_of_ranks(size: int) -> None:
    first = costs(size)[0]
    assert (first.sent, first.received, first.rank_lists) == (1, FAN_OUT, 0)
    assert first.sent_bytes < 100 + 100 * TENSORS
    assert costs(256) == costs(size)


@pytest.mark.parametrize("size", LARGE)
def test_a_step_seen_before_costs_a_rank_one_number_for_each_tensor(size: int) -> None:
    for step in costs(size)[2:]:
        assert step == Cost(sent=1, sent_bytes=8 + 8 * TENSORS, received=FAN_OUT, rank_lists=0,
                            decision_bytes=(8 + 8 * TENSORS,))


def test_a_rank_waits_for_its_whole_subtree_before_it_announces() -> None:
    job = Job(300)
    job.submit_all(allreduce("a"), but=[290]).settle()
    silent = {0, 1, 18, 290}  # the late rank and those above it
    assert {rank for rank, _, _ in job.announcements} == set(range(300)) - silent
    assert job.nodes[290].parent == 18
    assert job.nodes[18].parent == 1


# -- mismatches -------------------------------------------------------------------------------------------------------

A = allreduce("a", 3)


@pytest.mark.horovod("mismatch-kinds")
@pytest.mark.parametrize(("odd", "text"), [
    ({"kind": CollectiveType.BROADCAST}, "kind of collective: allreduce on ranks [0, 1]; broadcast on ranks [2]"),
    ({"tensors": A.tensors * 2}, "number of tensors: 1 on ranks [0, 1]; 2 on ranks [2]"),
    ({"tensors": (TensorSpec("float64", (3,)),)}, "dtype: float32 on ranks [0, 1]; float64 on ranks [2]"),
    ({"tensors": (TensorSpec("float32", ()),)}, "shape: (3,) on ranks [0, 1]; () on ranks [2]"),
    ({"scaled": ScaledOp(ReduceOp.SUM, 0.5, 2.0)},
     "prescale and postscale factors: (1.0, 1.0) on ranks [0, 1]; (0.5, 2.0) on ranks [2]"),
    ({"scaled": ScaledOp(ReduceOp.MAX)}, "reduce operation: Sum on ranks [0, 1]; Max on ranks [2]"),
    ({"root_rank": 1}, "root rank: 0 on ranks [0, 1]; 1 on ranks [2]"),
    ({"device": "gpu"}, "device: cpu on ranks [0, 1]; gpu on ranks [2]"),
    ({"wire_dtype": "float16"}, "compression: none on ranks [0, 1]; float16 on ranks [2]"),
    ({"layout": ((1,),)}, "which tensors of the list they submit: [0] on ranks [0, 1]; [1] on ranks [2]"),
    ({"layout": ((0,),)}, "how the list is packed (the packing depends on whether the call is eager or in a "
                          "tf.function, on shapes that are known or unknown when the tf.function is traced, and on "
                          "whether the tensors are on a GPU or on the CPU): one by one on ranks [0, 1]; ((0,),) on "
                          "ranks [2]")])
def test_a_mismatch_names_the_aspect_the_values_and_the_ranks(odd: dict, text: str) -> None:
    job = Job(3)
    job.submit_all(A, but=[2])
    job.submit(2, dataclasses.replace(A, **odd)).settle()
    assert job.mismatches == [("a", f"a: the ranks disagree on {text}.")]
    assert job.agreed == []


def of_list(labels: tuple[str, ...], *specs: TensorSpec) -> Request:
    return Request(CollectiveType.ALLGATHER, "a", specs, labels=labels)


INT8, INT16 = TensorSpec("int8", (2,)), TensorSpec("int16", (2,))


@pytest.mark.parametrize(("first", "second", "text"), [
    (allreduce("a", 3, labels=("dense/kernel",)), allreduce("a", 4, labels=("dense/kernel",)),
     "shape (dense/kernel): (3,) on ranks [0]; (4,) on ranks [1]"),
    (of_list(("kernel", "bias"), INT8, INT16), of_list(("kernel", "bias"), INT8, INT8),
     "dtype of tensor 1 (bias): int16 on ranks [0]; int8 on ranks [1]"),
    (of_list((), INT8, INT8), of_list((), INT8, INT16), "dtype of tensor 1: int8 on ranks [0]; int16 on ranks [1]"),
    (of_list((), TensorSpec("int8", (-1, 2))), of_list((), TensorSpec("int8", (-1, 3))),
     "shape: (any, 2) on ranks [0]; (any, 3) on ranks [1]")])
def test_a_mismatch_says_which_tensor_and_what_the_user_calls_it(first: Request, second: Request, text: str) -> None:
    assert describe_mismatch({second: {1}, first: {0}}, TWO) == f"a: the ranks disagree on {text}."


def test_the_dtype_and_then_the_kind_are_told_first_of_a_mismatch() -> None:
    other = dataclasses.replace(A, kind=CollectiveType.ALLGATHER, tensors=(TensorSpec("int8", (-1,)),),
                                scaled=ScaledOp(ReduceOp.SUM, 3.0))
    assert "dtype" in describe_mismatch({A: {0}, other: {1}}, TWO)
    other = dataclasses.replace(other, tensors=(TensorSpec(A.tensors[0].dtype, (-1,)),))
    assert "kind of collective" in describe_mismatch({A: {0}, other: {1}}, TWO)


def test_ranks_may_all_say_different_things() -> None:
    job = Job(20)
    for rank in range(20):
        job.submit(rank, allreduce("a", rank))
    job.settle()
    (_, text), = job.mismatches
    assert all(f"({rank},) on ranks [{rank}]" in text for rank in range(20))


def test_a_mismatch_in_a_graph_ends_the_engines_also_after_equal_requests_that_were_not_in_one() -> None:
    job = Job(2)
    eager = allreduce("a", 3), allreduce("a", 4)
    for request in eager * 3:
        job.submit_all(request).settle()
    job.submit(0, eager[0])
    job.submit(1, dataclasses.replace(eager[1], in_graph=True)).settle()
    assert job.end()[0] is EndReason.MISMATCH


@pytest.mark.parametrize("odd", [0, 17])
def test_a_mismatch_in_a_graph_ends_all_engines(odd: int) -> None:
    job = Job(18)
    same, other = (dataclasses.replace(allreduce("a", n), in_graph=True) for n in (3, 4))
    job.submit_all(allreduce("b"))
    job.submit_all(same, but=[odd])
    job.submit(odd, other).settle()
    assert job.agreed == ["b"]
    (_, text), = job.mismatches
    assert job.end() == (EndReason.MISMATCH, describe_mismatch_in_graph(text))
    assert "a: the ranks disagree on shape" in text


def test_many_ranks_are_written_as_runs() -> None:
    def said(ranks: set[int]) -> str:
        return describe_mismatch({allreduce("a", 1): ranks, allreduce("a", 2): {10_000}}, Topology(0, ("",) * 10_001))

    assert "on ranks [0, 1, 2]; " in said({0, 1, 2})
    assert "on ranks [0-3]; " in said({0, 1, 2, 3})
    assert "on ranks [0, 2-5, 7]; " in said({0, 2, 3, 4, 5, 7})
    assert "36, 38, ...]; " in said(set(range(0, 200, 2)))


# -- stalls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 18, 40, 300])
def test_a_stall_names_what_the_missing_rank_waits_for_instead(size: int) -> None:
    missing = size - 1
    job = Job(size)
    job.submit_all(allreduce("a"), but=[missing])
    job.submit(missing, allreduce("b"))
    job.settle(0, 31, 62, 93)
    text = job.nodes[0].stalls.report(job.now)
    assert f"have waited 93 s for ranks [{missing}], which wait for b instead." in text
    assert job.nodes[0].stalls.stalled(job.now, WARNING_S)["a"] == [missing]


def test_a_stall_names_only_what_the_missing_ranks_wait_for() -> None:
    job = Job(4)
    job.submit_all(allreduce("a"), but=[2, 3])
    job.submit_all(allreduce("b"), but=[2, 3])
    job.submit(3, allreduce("c")).settle()
    text = job.nodes[0].stalls.report(61.0)
    assert "a: ranks [0, 1] have waited 61 s for ranks [2, 3], which wait for c instead." in text
    assert "c: ranks [3] have waited 61 s for ranks [0, 1, 2], which wait for a, b instead." in text
    assert "Every rank must call the same collectives with the same names" in text


def test_a_stall_is_reported_again_after_a_while_and_only_by_rank_0() -> None:
    job = Job(2)
    job.submit_all(allreduce("a"), but=[1]).settle()
    root = job.nodes[0]
    assert root.stalls.report(59.0) is None
    assert root.stalls.report(61.0) is not None
    assert root.stalls.report(62.0) is None
    assert root.stalls.report(120.0) is None
    assert root.stalls.report(121.0) is not None
    job = Job(2)
    job.submit(1, allreduce("a"))
    assert job.nodes[1].stalls.report(1000.0) is None


def answer_all(job: Job) -> list[int]:
    """Let all ranks act, and those that are asked answer. Returns the ranks that were asked."""
    before = len(job.decisions)
    job.settle()
    asked = [rank for decision, _ in job.decisions[before:] for rank in decision.asks]
    for rank in asked:
        job.nodes[rank].answer(f"in the main thread:\n  line {rank}")
    job.settle()
    return asked


@pytest.mark.parametrize(("size", "missing"), [(2, [1]), (2, [0]), (40, [3, 39])])
def test_ranks_that_others_wait_for_are_asked_where_they_are_before_the_report(size: int, missing: list[int]) -> None:
    job = Job(size)
    job.submit_all(allreduce("a"), but=missing)
    # A rank between two others passes an incomplete request on after half of the time.
    for job.now in (0.0, 31.0, 57.0):
        assert answer_all(job) == []
    job.now = 58.5
    assert answer_all(job) == missing
    assert answer_all(job) == []
    text = job.nodes[0].stalls.report(92.0)
    for rank in missing:
        assert f"\nRank {rank} on  is here, in the main thread:\n  line {rank}" in text
    job.now = 151.0
    assert answer_all(job) == missing  # Again, before the next report.


def test_a_rank_that_does_not_answer_is_named() -> None:
    job = Job(2)
    job.nodes[0].stalls.look = lambda rank: f"\nRank {rank} seen from outside."
    job.submit(0, allreduce("a")).settle()
    job.settle(59.0)
    text = job.nodes[0].stalls.report(61.0)
    assert "\nRank 1 on  has not answered where it is: its engine waits" in text
    assert text.endswith(" keeps Python's interpreter lock.\nRank 1 seen from outside.")


def test_answers_are_no_news() -> None:
    assert not Decision(asks=(1,)).is_news
    assert Decision((1,), asks=(1,)).is_news
    root = Job(2).nodes[0]
    assert root.receive(1, Announcement(places=((1, "there"),)).to_bytes(), 0.0) is False
    assert root.receive(1, Announcement(ends_vote=True).to_bytes(), 0.0) is True


def test_what_is_complete_is_no_stall() -> None:
    job = Job(3)
    job.submit_all(allreduce("a"), but=[1]).settle()
    job.submit(1, allreduce("a")).settle(59.0)
    job.submit_all(allreduce("a"), but=[1])  # The same name again begins anew.
    job.settle(100.0)
    assert job.nodes[0].stalls.stalled(110.0, WARNING_S) == {}
    assert job.nodes[0].stalls.report(110.0) is None


def test_a_report_of_many_stalls_is_short() -> None:
    job = Job(2)
    job.submit_all(*(allreduce(f"t{i}") for i in range(50)), but=[1]).settle()
    text = job.nodes[0].stalls.report(61.0)
    assert "t5: " in text
    assert "t6: " not in text
    assert "And 44 more tensors are incomplete." in text


@pytest.mark.parametrize("size", [2, 18, 40])
def test_a_stall_ends_all_engines_in_the_end(size: int) -> None:
    job = Job(size)
    job.submit_all(allreduce("a"), but=[size - 1])
    for now in (0, 31, 62, 600):
        job.settle(now)
        assert job.end()[0] is None
    job.settle(601.0)
    end, text = job.end()
    assert end is EndReason.STALL
    assert "a: ranks [" in text
    assert f"have waited 601 s for ranks [{size - 1}], which wait for no collective." in text
    assert text.endswith("The engines have ended after 600 s (MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS).")
    job.forget_messages()
    job.submit(size - 1, allreduce("a")).settle(1e6)
    assert job.end() == (end, text) and job.decisions == []  # It ends once, and rank 0 decides nothing more.


def test_the_end_by_a_stall_names_also_what_the_missing_ranks_began_to_wait_for_later() -> None:
    job = Job(2)
    job.submit(0, allreduce("lonely")).settle(0.0)
    job.submit(1, allreduce("another")).settle(5.0, 601.0)
    _, text = job.end()
    assert "lonely: ranks [0] have waited 601 s for ranks [1], which wait for another instead." in text
    assert "another: ranks [1] have waited 596 s for ranks [0], which wait for lonely instead." in text


def test_a_stall_deep_in_the_tree_ends_all_engines_too() -> None:
    # Only one rank has submitted, so what rank 0 knows comes through the ranks between.
    job = Job(300)
    job.submit(290, allreduce("a"))
    job.settle(*range(0, 800, 10))
    assert job.end()[0] is EndReason.STALL
    assert "a: ranks [290] have waited" in job.end()[1]
    assert "for ranks [0-289, 291-299]" in job.end()[1]


def test_without_a_warning_time_nothing_is_reported_or_told() -> None:
    job = Job(18, warning_s=None, abort_s=None)
    job.submit(17, allreduce("a"))
    job.settle(0.0, 1e3, 1e6)
    assert job.nodes[0].stalls.report(1e6) is None
    assert job.nodes[0].stalls.stalled(1e6, 60.0) == {}
    assert [rank for rank, _, _ in job.announcements] == [17]


def test_a_waiting_rank_looks_up_now_and_then() -> None:
    node = coordinator(0, 2, WARNING_S)
    assert node.next_check_s() > 10
    node.submit(allreduce("a"), 0.0)
    assert 0 < node.next_check_s() <= 1
    assert coordinator(0, 2).next_check_s() > 10


def test_a_rank_that_rank_0_does_not_answer_ends_after_the_limit() -> None:
    node = Coordinator(Topology(3, ("here", "here", "there", "there")), CAPACITY, WARNING_S, ABORT_S)
    node.submit(allreduce("a"), 0.0)
    node.submit(allreduce("b"), 100.0)
    assert 0 < node.next_check_s() <= 1
    for now in range(int(ABORT_S) + 4):
        node.check(now)  # Rank 0 may just be about to say that it is too late.
    with pytest.raises(StallError, match=r"^a: rank 3 on there has waited 604 s for ranks \[0\] on here\. Either the "
                                         "network between the hosts there and here is down"):
        node.check(ABORT_S + 4.0)
    node.learn(Decision(agreed=((None, allreduce("a")),), errors=(("b", "the ranks disagree"),)))
    node.check(1e6)


def test_ranks_further_from_rank_0_give_it_the_time_that_those_between_take() -> None:
    far = 17 * FAN_OUT
    for rank, waits_s in ((1, 0.0), (17, WARNING_S / 2), (far + 1, WARNING_S)):
        node = coordinator(rank, far + 2, WARNING_S, ABORT_S)
        node.submit(allreduce("a"), 0.0)
        for now in range(int(ABORT_S + waits_s) + 4):
            node.check(now)
        with pytest.raises(StallError, match="a: rank"):
            node.check(ABORT_S + 4.0 + waits_s)


def test_a_rank_that_has_not_looked_for_long_reads_its_messages_before_it_blames_rank_0() -> None:
    node = coordinator(1, 2, WARNING_S, ABORT_S)
    node.submit(allreduce("a"), 0.0)
    node.check(1.0)
    node.check(1e6)
    node.check(1e6 + 3.9)
    with pytest.raises(StallError, match="a: rank"):
        node.check(1e6 + 4.0)
    patient = coordinator(1, 2, WARNING_S, None)
    patient.submit(allreduce("a"), 0.0)
    patient.check(1.0)
    patient.check(1e6)
    patient.check(1e6 + 4.0)


@pytest.mark.parametrize("present, is_named", [((0, 1), True), ((0, 2), False)])
def test_a_stall_of_a_whole_host_may_be_for_the_network(present: tuple[int, ...], is_named: bool) -> None:
    root = Coordinator(Topology(0, ("here", "here", "there", "there")), CAPACITY, WARNING_S, ABORT_S)
    for rank in present:
        if rank:
            root.receive(rank, Announcement(requests=((allreduce("a"), None),)).to_bytes(), 0.0)
        else:
            root.submit(allreduce("a"), 0.0)
    _, decision = root.advance(ABORT_S + 1)
    assert decision is not None and decision.end is EndReason.STALL
    assert ("Or the network between the hosts here and there is down or loses what is sent: no rank on the other side "
            "has called a." in decision.end_text) == is_named


@pytest.mark.parametrize("answers", [False, True])
def test_a_stall_of_some_ranks_of_a_host_that_does_not_answer_may_be_for_the_network(answers: bool) -> None:
    root = Coordinator(Topology(0, ("here", "here", "there", "there")), CAPACITY, WARNING_S, ABORT_S)
    root.submit(allreduce("a"), 0.0)
    for rank in (1, 2):
        root.receive(rank, Announcement(requests=((allreduce("a"), None),)).to_bytes(), 0.0)
    _, decision = root.advance(ABORT_S - 1)
    assert decision is not None and decision.asks == (3,)
    if answers:
        root.receive(1, Announcement(places=((3, "in the main thread"),)).to_bytes(), ABORT_S - 1)
    _, decision = root.advance(ABORT_S + 1)
    assert decision is not None and decision.end is EndReason.STALL
    network = ("Or the network between the hosts here and there is down or loses what is sent: no rank on the other "
               "side answers.")
    assert (network in decision.end_text) is not answers


# -- what is told of incomplete work ----------------------------------------------------------------------------------


def partial(job: Job) -> list[tuple[int, tuple[int, ...]]]:
    """The announcements that name ranks, as (from rank, named ranks)."""
    return [(rank, ranks) for rank, announcement, _ in job.announcements for _, ranks in announcement.requests
            if ranks is not None]


def test_an_inner_rank_tells_of_incomplete_work_when_it_is_old_and_again_only_when_there_is_news() -> None:
    job = Job(40)
    job.submit_all(allreduce("a"), but=[20, 21]).settle(0.0, 29.0)
    assert partial(job) == []
    job.settle(31.0, 32.0, 33.0)
    told = (1, 17, 18, 19, *range(22, 33))
    assert partial(job) == [(1, told)]
    job.submit(21, allreduce("a")).settle(34.0)
    assert partial(job) == [(1, told), (1, tuple(sorted({*told, 21})))]


@pytest.mark.parametrize("size", [18, 40, 300])
def test_work_that_was_told_of_in_part_is_executed_once_when_complete(size: int) -> None:
    job = Job(size)
    late = [size - 1, 17]
    job.submit_all(allreduce("a", 3), but=late)
    job.settle(0.0, 31.0, 62.0, 93.0)
    for rank in set(late):
        job.submit(rank, allreduce("a", 3)).settle(94.0)
    assert job.agreed == ["a"]
    assert all(not node.stalls.stalled(1e6, 0.0) for node in job.nodes)


def test_a_mismatch_that_was_told_of_in_part_is_found_when_complete() -> None:
    job = Job(40)
    job.submit_all(allreduce("a", 3), but=[20, 21])
    job.submit(20, allreduce("a", 4))
    job.settle(0.0, 31.0)
    assert job.mismatches == []
    job.submit(21, allreduce("a", 3)).settle(32.0)
    assert job.mismatches == [("a", "a: the ranks disagree on shape: (3,) on ranks [0-19, 21-39]; (4,) on ranks [20].")]


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_when_all_ranks_have_ended_the_engines_end(size: int) -> None:
    job, source = Job(size), random.Random(size)
    for rank in source.sample(range(size), size):
        assert job.end()[0] is None
        job.nodes[rank].end(completed=3)
        if size < 50 or rank % 10 == 0:
            job.settle()
    job.settle()
    assert job.end()[0] is EndReason.SHUTDOWN


@pytest.mark.parametrize(("size", "ended", "late"), [(2, 1, 0), (18, 17, 0), (40, 20, 21), (300, 290, 18)])
def test_a_rank_that_has_ended_still_executes_what_it_submitted(size: int, ended: int, late: int) -> None:
    job = Job(size)
    job.submit_all(allreduce("a"), but=[ended, late]).settle()
    job.submit(ended, allreduce("a"))
    job.nodes[ended].end(completed=0)
    job.settle()
    assert job.end()[0] is None
    job.submit(late, allreduce("a")).settle()
    assert job.agreed == ["a"]
    assert job.end()[0] is None


@pytest.mark.parametrize("ends_first", [True, False])
@pytest.mark.parametrize(("size", "ended"), [(2, 0), (2, 1), (18, 17), (40, 1), (40, 33), (300, 290)])
def test_work_that_waits_for_a_rank_that_has_ended_ends_all(size: int, ended: int, ends_first: bool) -> None:
    job, waiting = Job(size), (ended + 1) % size
    for has_to_end in (ends_first, not ends_first):
        assert job.end()[0] is None
        if has_to_end:
            job.nodes[ended].end(completed=12)
        else:
            job.submit(waiting, allreduce("a"))
        job.settle()
    end, text = job.end()
    assert end is EndReason.RANK_LEFT
    assert text.startswith(f"a: ranks [{waiting}] wait for ranks [{ended}], which have already shut down "
                           "(after 12 operations).")
    assert "give every rank the same number" in text


def test_ranks_that_ended_after_different_numbers_of_operations_are_all_named() -> None:
    job = Job(4)
    for rank, completed in ((1, 7), (2, 5), (3, 7)):
        job.nodes[rank].end(completed)
    job.submit(0, allreduce("a")).settle()
    assert job.end()[0] is not None
    assert "wait for ranks [1, 2, 3], which have already shut down (after 5, 7 operations)" in job.end()[1]


@pytest.mark.parametrize(("size", "failed"), [(1, 0), (2, 0), (2, 1), (18, 17), (40, 1), (300, 290)])
def test_a_failure_of_one_rank_ends_all_and_nothing_more_is_executed(size: int, failed: int) -> None:
    # The rank that failed takes part in nothing any more, and the others would wait for it.
    job = Job(size)
    job.submit_all(allreduce("a"))
    job.nodes[failed].fail("rank failed: why")
    job.nodes[failed].fail("and something else after that")
    job.settle()
    assert job.end() == (EndReason.FAILURE, "rank failed: why")
    assert job.agreed == []


def test_a_failure_comes_before_any_other_reason_to_end() -> None:
    job = Job(2)
    job.submit(0, allreduce("a")).settle(0.0)
    job.nodes[1].end(completed=0)
    job.nodes[1].fail("why")
    job.settle(601.0)
    assert job.end() == (EndReason.FAILURE, "why")


# -- what no rank sends -----------------------------------------------------------------------------------------------


def test_a_number_that_stands_for_nothing_is_told_with_its_sender() -> None:
    job = repeated_step(3, ["a"])
    with pytest.raises(MessageError, match=r"^rank 2 sent the number 9, which stands for no request on rank 0\.$"):
        job.nodes[0].receive(2, Announcement(ids=(0, 9)).to_bytes(), 0.0)
    with pytest.raises(MessageError, match=r"^rank 0 sent the number 9, which stands for no request on rank 1\.$"):
        job.nodes[1].learn(Decision(agreed=(9,)))


@pytest.mark.parametrize("source", [0, 17, 18, 300])
def test_an_announcement_is_taken_from_children_only(source: int) -> None:
    with pytest.raises(MessageError, match=rf"^rank {source} sent an announcement to rank 0, which is not its parent"):
        Job(18).nodes[0].receive(source, Announcement(requests=((allreduce("a", 1), None),)).to_bytes(), 0.0)


def test_what_is_no_announcement_is_told_with_its_sender() -> None:
    with pytest.raises(MessageError, match=r"^rank 1 sent 3 bytes that are no Announcement: "):
        Job(2).nodes[0].receive(1, b"\2\x95\xc1", 0.0)


# -- ranks that join --------------------------------------------------------------------------------------------------


def joined_job(size: int, *ranks: int) -> Job:
    job = Job(size)
    for rank in ranks:
        job.submit(rank, join_request()).settle()
    return job


def absent_ranks(job: Job) -> list[tuple[int, ...]]:
    return [ranks for decision, _ in job.decisions for ranks in decision.absent]


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_collective_goes_on_without_the_ranks_that_have_joined(size: int) -> None:
    gone = sorted({0, size - 1, size // 2} - {1})
    job = joined_job(size, *gone)
    for _ in range(4):  # The request gets a number, and comes again.
        job.submit_all(allreduce("a"), but=gone).settle()
    assert job.agreed == ["a"] * 4
    assert absent_ranks(job) == [tuple(gone)] * 4


@pytest.mark.parametrize("size", SIZES[:-1])
def test_when_all_ranks_have_joined_all_get_the_last_and_begin_anew(size: int) -> None:
    order = list(range(size))
    random.Random(size).shuffle(order)
    job = joined_job(size, *order[:-1])
    assert not any(decision.last_joined for decision, _ in job.decisions)
    job.submit(order[-1], join_request()).settle()
    assert [decision.last_joined for decision, _ in job.decisions if decision.last_joined] == [(order[-1],)]
    job.forget_messages()
    job.submit_all(allreduce("a"), but=[0]).settle()
    assert job.agreed == []
    job.submit(0, allreduce("a")).settle()
    assert job.agreed == ["a"]
    assert absent_ranks(job) == []


def test_ranks_that_have_not_joined_may_disagree() -> None:
    job = joined_job(4, 3)
    job.submit(0, allreduce("a", 1))
    job.submit_all(allreduce("a", 2), but=[0, 3]).settle()
    assert [text for _, text in job.mismatches] == ["a: the ranks disagree on shape: (1,) on ranks [0]; (2,) on ranks "
                                                    "[1, 2]."]
    job.submit_all(allreduce("a", 2), but=[3]).settle()
    assert job.agreed == ["a"]


@pytest.mark.parametrize(("request_", "reason"), [
    (allreduce("a", 4, kind=CollectiveType.REDUCESCATTER), "reducescatter .*rows for ranks [1] would be lost"),
    (Request(CollectiveType.ALLTOALL, "a"), "alltoall .*rows for ranks [1] would be lost"),
    (allreduce("a", kind=CollectiveType.BROADCAST, root_rank=1), "broadcast .*its root is one of them"),
    (allreduce("a", scaled=ScaledOp(ReduceOp.MAX, 2.0)), "allreduce .*Max with a prescale factor")])
def test_what_has_no_result_without_a_rank_is_an_error(request_: Request, reason: str) -> None:
    job = joined_job(20, 1)
    job.submit_all(request_, but=[1]).settle()
    (name, text), = job.mismatches
    start, _, end = reason.partition(".*")
    assert name == "a"
    assert f"a: {start}is not supported with join() at this time: ranks [1] have joined" in text
    assert end in text
    assert job.agreed == []


def test_a_rank_that_ends_while_others_wait_in_join_is_an_error() -> None:
    job = joined_job(3, 1)
    job.nodes[2].end(5)
    job.settle()
    reason, text = job.end()
    assert reason is EndReason.RANK_LEFT
    assert "join(): ranks [1] wait for ranks [2]" in text


def test_a_join_stalls_only_if_the_other_ranks_do_nothing() -> None:
    job = joined_job(3, 1)
    for now in (50.0, 100.0):
        job.now = now
        job.submit_all(allreduce("a"), but=[1]).settle()
        assert job.nodes[0].stalls.report(now) is None
    report = job.nodes[0].stalls.report(170.0)
    assert "join(): ranks [1] have waited 70 s for ranks [0, 2], which wait for no collective" in report
    job.settle(100.0 + ABORT_S + 1.0)
    assert job.end()[0] is EndReason.STALL


@pytest.mark.parametrize("seed", range(20))
def test_random_joins_are_the_same_on_all_ranks(seed: int) -> None:
    chooser = random.Random(seed)
    size = chooser.choice([2, 3, 18, 40])
    job = Job(size)
    for _ in range(2):
        steps = [chooser.randrange(6) for _ in range(size)]
        left = [[*(allreduce(str(i)) for i in range(count)), join_request()] for count in steps]
        while any(left) or any(job.mail):
            rank = chooser.randrange(size)
            if left[rank] and chooser.random() < 0.5:
                job.submit(rank, left[rank].pop(0))
            job.turn(rank, chooser.randrange(1, 4))
        job.settle()
        absent = {}
        for decision, _ in job.decisions:
            names = [request.name for _, request in decision.agreed]  # no name comes often enough for a number
            absent.update(zip(names, decision.absent or [()] * len(names), strict=True))
        assert absent == {str(i): tuple(rank for rank in range(size) if steps[rank] <= i) for i in range(max(steps))}
        *others, end = (len(decision.last_joined) for decision, _ in job.decisions)
        assert not any(others) and end == 1  # The last join comes after all collectives.
        job.forget_messages()
    assert len(set(map(tuple, job.executed))) == 1
