"""BucketPlans: what is reduced as one, and how."""

import numpy as np
import pytest

from mpistrat.bucket_plans import BucketPlans
from mpistrat.messages import ReduceOp, Request
from mpistrat.requests import Average, Sum, allreduce_request, specs_of
from mpistrat.tensor_queue import Entry, Handle


def entry(array: np.ndarray, op: ReduceOp = Average, prescale: float = 1.0, wire: str = "") -> Entry:
    request = allreduce_request("a", specs_of([array]), op, prescale, 3.0, wire=wire)
    return Entry(request, [array], Handle("a"))


@pytest.mark.parametrize(("dtype", "size", "prescale", "divisor"), [("float32", 4, 0.125, 1), ("float32", 3, 0.5, 3),
                                                                    ("float16", 4, 0.5, 4), ("int32", 4, 0.5, 4)])
def test_an_average_is_divided_where_it_costs_least(dtype: str, size: int, prescale: float, divisor: int) -> None:
    bucket, = BucketPlans(size).plan([entry(np.ones(5, dtype), prescale=0.5)], 100)
    assert (bucket.op, bucket.prescale, bucket.scale.factor, bucket.scale.divisor) == (Sum, prescale, 3.0, divisor)


def test_what_travels_in_half_precision_is_divided_afterwards() -> None:
    bucket, = BucketPlans(2).plan([entry(np.ones(5, np.float32), wire="float16")], 100)
    assert (bucket.prescale, bucket.scale.divisor) == (1.0, 2)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_nothing_else_is_divided(op: ReduceOp) -> None:
    bucket, = BucketPlans(2).plan([entry(np.ones(5), op, prescale=0.5)], 100)
    assert (bucket.op, bucket.prescale, bucket.scale.factor, bucket.scale.divisor) == (op, 0.5, 3.0, 1)


def test_a_list_seen_before_has_the_same_plan_until_the_limit_changes() -> None:
    plans = BucketPlans(2)
    arrays = [np.ones(5), np.ones(7)]

    def request(name: str, array: np.ndarray) -> Request:
        return allreduce_request(name, specs_of([array]), Sum)

    entries = [Entry(request(f"{i}", array), [array], Handle(f"{i}")) for i, array in enumerate(arrays)]
    first = plans.plan(entries, 1000)
    assert [bucket.members for bucket in first] == [((0, 0), (1, 0))]
    assert plans.plan(entries, 1000) is first
    assert [bucket.members for bucket in plans.plan(entries, 10)] == [((0, 0),), ((1, 0),)]
