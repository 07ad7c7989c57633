"""What ranks tell each other, and its byte form."""

import dataclasses

import pytest

from mpistrat.messages import Announcement, Decision, End, Kind, ReduceOp, Request, TensorSpec

PLAIN = Request(Kind.ALLREDUCE, "a", (TensorSpec("float32", (2, 3)),))
FULL = Request(Kind.BROADCAST, "gradient/17", (TensorSpec("bfloat16", ()), TensorSpec("int64", (0, 4))),
               ReduceOp.MAX, 3, 0.5, 2.0, "gpu", ((0,), (2, 1)), "float16", ("dense/kernel", "dense/bias"))
BARRIER = Request(Kind.BARRIER, "b")
GATHER = Request(Kind.ALLGATHER, "g", (TensorSpec("bool", (-1, 7)),))
REQUESTS = [PLAIN, FULL, BARRIER, GATHER]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.kind.value)
def test_a_request_comes_back_from_its_tuple(request_: Request) -> None:
    copy = Request.from_tuple(request_.to_tuple())
    assert copy == request_
    assert copy.labels == request_.labels
    assert type(copy.kind) is Kind
    assert type(copy.reduce_op) is ReduceOp


@pytest.mark.parametrize("message", [
    Announcement(),
    Announcement(ids=(0, 5, 2**40)),
    Announcement(requests=((PLAIN, None), (FULL, (0, 2, 300)), (GATHER, ()))),
    Announcement((1,), ((BARRIER, None),), ended=((4, 12), (5, 0)), failure="Traceback: ä\nline 2")])
def test_an_announcement_comes_back_from_its_bytes(message: Announcement) -> None:
    copy = Announcement.from_bytes(message.to_bytes())
    assert copy == message
    assert [request.labels for request, _ in copy.requests] == [request.labels for request, _ in message.requests]


@pytest.mark.parametrize("message", [
    Decision(),
    Decision(agreed=(0, (7, PLAIN), 3, (None, FULL))),
    Decision(errors=(("a", "the ranks disagree"),), ended=True),
    *(Decision((1,), (), False, end, "why: ü") for end in End)])
def test_a_decision_comes_back_from_its_bytes(message: Decision) -> None:
    copy = Decision.from_bytes(message.to_bytes())
    assert copy == message
    assert copy.end is message.end


def test_labels_are_not_compared() -> None:
    other = dataclasses.replace(FULL, labels=("model/other",))
    assert other == FULL
    assert hash(other) == hash(FULL)


@pytest.mark.parametrize("change", [
    {"kind": Kind.ALLREDUCE}, {"name": "x"}, {"tensors": FULL.tensors[:1]}, {"tensors": FULL.tensors[::-1]},
    {"reduce_op": ReduceOp.MIN}, {"root_rank": 0}, {"prescale": 1.0}, {"postscale": 1.0}, {"device": "cpu"}],
    ids=lambda change: next(iter(change)))
def test_everything_but_labels_is_compared(change: dict) -> None:
    assert dataclasses.replace(FULL, **change) != FULL


@pytest.mark.parametrize("other", [TensorSpec("float64", (2, 3)), TensorSpec("float32", (3, 2)),
                                   TensorSpec("float32", (6,))])
def test_tensors_differ_by_dtype_and_shape(other: TensorSpec) -> None:
    assert other != TensorSpec("float32", (2, 3))


def test_the_operations_have_horovods_numbers() -> None:
    assert [int(ReduceOp[name]) for name in ("AVERAGE", "SUM", "ADASUM", "MIN", "MAX", "PRODUCT")] == list(range(6))
