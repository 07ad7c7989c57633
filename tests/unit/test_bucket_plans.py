"""BucketPlans: what is reduced as one, and how."""

import numpy as np
import pytest

from mpistrat.bucket_plans import BucketPlans
from mpistrat.messages import ReduceOp, Request
from mpistrat.requests import Sum, allreduce_request, specs_of
from mpistrat.tensor_queue import Entry, Handle


@pytest.mark.parametrize(("op", "reduced_by", "divisor"), [(ReduceOp.AVERAGE, ReduceOp.SUM, 4),
                                                           (ReduceOp.SUM, ReduceOp.SUM, 1),
                                                           (ReduceOp.MIN, ReduceOp.MIN, 1)])
def test_an_average_is_a_sum_divided_by_the_number_of_ranks(op: ReduceOp, reduced_by: ReduceOp, divisor: int) -> None:
    array = np.ones(5)
    entry = Entry(allreduce_request("a", specs_of([array]), op, 0.5, 3.0), [array], Handle("a"))
    bucket, = BucketPlans(4).plan([entry], 100)
    assert (bucket.op, bucket.scale.factor, bucket.scale.divisor) == (reduced_by, 3.0, divisor)


def test_a_list_seen_before_has_the_same_plan_until_the_limit_changes() -> None:
    plans = BucketPlans(2)
    arrays = [np.ones(5), np.ones(7)]

    def request(name: str, array: np.ndarray) -> Request:
        return allreduce_request(name, specs_of([array]), Sum)

    entries = [Entry(request(f"{i}", array), [array], Handle(f"{i}")) for i, array in enumerate(arrays)]
    first = plans.plan(entries, 1000)
    assert [(bucket.members, bucket.whole) for bucket in first] == [(((0, 0), (1, 0)), None)]
    assert plans.plan(entries, 1000) is first
    assert [(bucket.members, bucket.whole) for bucket in plans.plan(entries, 10)] == [(((0, 0),), 0), (((1, 0),), 1)]


def test_a_bucket_of_some_of_an_entrys_arrays_is_not_a_whole_entry() -> None:
    arrays = [np.ones(5, np.float32), np.ones(5), np.ones(7, np.float32)]
    mixed = Entry(allreduce_request("mixed", specs_of(arrays), Sum), arrays, Handle("mixed"))
    same = Entry(allreduce_request("same", specs_of(arrays[::2]), Sum), arrays[::2], Handle("same"))
    plan = BucketPlans(2).plan([mixed, same], 1000)
    assert [(bucket.members, bucket.whole) for bucket in plan] == [(((0, 0), (0, 2), (1, 0), (1, 1)), None),
                                                                   (((0, 1),), None)]
