"""Buckets, and the memory in which they are joined."""

import random

import numpy as np
import pytest

from mpistrat.core.arithmetic import FlatLayout, pack, unpack
from mpistrat.core.fusion import BucketPlans, buckets_from_last, plan_buckets
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.memory import ALIGNMENT, FusionBuffer
from mpistrat.core.request import ReduceOp, Request, ScaledOp, Sum, allreduce_request, specs_of


def test_gradients_are_grouped_from_the_last_on_and_a_large_one_is_alone() -> None:
    assert buckets_from_last([4, 4, 9, 1, 1], limit=8) == [[4, 3], [2], [1, 0]]
    assert buckets_from_last([0, 0], limit=0) == [[1, 0]]
    assert buckets_from_last([4, 4, 1, 1, 1], 8, first_limit=2) == [[4, 3], [2, 1], [0]]
    assert buckets_from_last([4, 4, 9], 8, first_limit=2) == [[2], [1, 0]]


@pytest.mark.parametrize(("members", "limit", "plan"), [
    ([("f", 4)] * 5, 8, [[0, 1], [2, 3], [4]]), ([("f", 4), ("f", 4)], 7, [[0], [1]]),
    ([("f", 4)] * 4, 0, [[0], [1], [2], [3]]),
    # A large one is alone.
    ([("f", 1), ("f", 1000), ("f", 1)], 10, [[0], [1], [2]]),
    # Keys never share a bucket.
    ([("f", 4), ("h", 2), ("f", 4), ("h", 2)], 16, [[0, 2], [1, 3]]),
    # A smaller member is taken past one that does not fit.
    ([("f", 2), ("f", 7), ("f", 6)], 9, [[0, 1], [2]]), ([("f", 2), ("f", 6), ("f", 1)], 7, [[0], [1, 2]]),
    ([("f", 1), ("f", 7), ("f", 1)], 8, [[0, 1], [2]]), ([("f", 3), ("f", 6), ("f", 1)], 9, [[0, 1], [2]]),
    ([("f", 3), ("h", 3), ("f", 4), ("f", 3)], 9, [[0, 2], [1], [3]]),
    # Looking ahead ends when what is taken and what is skipped exceed the limit.
    ([("f", 4), ("h", 8), ("f", 4)], 12, [[0, 2], [1]]), ([("f", 4), ("h", 8), ("f", 4)], 11, [[0], [1], [2]])])
def test_members_of_one_key_share_buckets(members: list[tuple[str, int]], limit: int, plan: list[list[int]]) -> None:
    assert plan_buckets(members, limit) == plan


@pytest.mark.parametrize("seed", range(20))
def test_any_plan_covers_all_members_once_within_key_and_limit(seed: int) -> None:
    source = random.Random(seed)
    limit = source.choice([0, 1, 10, 100])
    members = [(source.choice("fhi"), source.randrange(1, 40)) for _ in range(source.randrange(60))]
    plan = plan_buckets(members, limit)
    assert sorted(index for bucket in plan for index in bucket) == list(range(len(members)))
    assert [bucket[0] for bucket in plan] == sorted(bucket[0] for bucket in plan)
    for bucket in plan:
        assert bucket == sorted(bucket)
        assert len({members[index][0] for index in bucket}) == 1
        assert len(bucket) == 1 or sum(members[index][1] for index in bucket) <= limit


def test_a_buffer_is_the_same_memory_until_it_must_grow() -> None:
    buffer = FusionBuffer()
    first = buffer.view(100, np.dtype(np.float32))
    second = buffer.view(10, np.dtype(np.float64))
    third = buffer.view(101, np.dtype(np.float32))
    assert (first.shape, second.shape, third.shape) == ((100,), (10,), (101,))
    assert first.ctypes.data == second.ctypes.data
    assert not np.shares_memory(first, third)


@pytest.mark.parametrize("elements", [0, 1, 3, 1000])
def test_a_buffer_is_aligned(elements: int) -> None:
    view = FusionBuffer().view(elements, np.dtype(np.float64))
    assert view.shape == (elements,)
    assert not elements or view.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize(("op", "reduced_by", "divisor"), [(ReduceOp.AVERAGE, ReduceOp.SUM, 4),
                                                           (ReduceOp.SUM, ReduceOp.SUM, 1),
                                                           (ReduceOp.MIN, ReduceOp.MIN, 1)])
def test_an_average_is_a_sum_divided_by_the_number_of_ranks(op: ReduceOp, reduced_by: ReduceOp, divisor: int) -> None:
    array = np.ones(5)
    entry = Entry(allreduce_request("a", specs_of([array]), ScaledOp(op, 0.5, 3.0)), [array], Handle("a"))
    bucket, = BucketPlans(4).plan([entry], 100)
    assert bucket.reduction.op == reduced_by
    assert bucket.reduction.prescale == 0.5
    assert (bucket.reduction.scale.factor, bucket.reduction.scale.divisor) == (3.0, divisor)


def test_a_list_seen_before_has_the_same_plan_until_the_limit_changes() -> None:
    plans = BucketPlans(2)
    arrays = [np.ones(5), np.ones(7)]

    def request(name: str, array: np.ndarray) -> Request:
        return allreduce_request(name, specs_of([array]), ScaledOp(Sum))

    entries = [Entry(request(f"{i}", array), [array], Handle(f"{i}")) for i, array in enumerate(arrays)]
    first = plans.plan(entries, 1000)
    assert [(bucket.members, bucket.whole) for bucket in first] == [(((0, 0), (1, 0)), None)]
    assert plans.plan(entries, 1000) is first
    assert [(bucket.members, bucket.whole) for bucket in plans.plan(entries, 10)] == [(((0, 0),), 0), (((1, 0),), 1)]


def test_a_bucket_of_some_of_an_entrys_arrays_is_not_a_whole_entry() -> None:
    arrays = [np.ones(5, np.float32), np.ones(5), np.ones(7, np.float32)]
    mixed = Entry(allreduce_request("mixed", specs_of(arrays), ScaledOp(Sum)), arrays, Handle("mixed"))
    same = Entry(allreduce_request("same", specs_of(arrays[::2]), ScaledOp(Sum)), arrays[::2], Handle("same"))
    plan = BucketPlans(2).plan([mixed, same], 1000)
    assert [(bucket.members, bucket.whole) for bucket in plan] == [(((0, 0), (0, 2), (1, 0), (1, 1)), None),
                                                                   (((0, 1),), None)]


ARRAYS = [np.arange(6.0).reshape(2, 3), np.array(6.0), np.empty((0, 5)), np.array([[7.0]]), np.arange(8.0, 13.0)]


def test_arrays_are_copied_out_in_order_scaled_or_not_and_back() -> None:
    part, results = np.empty(13), [np.full_like(array, -1) for array in ARRAYS]
    pack(ARRAYS, part, 0.5)
    np.testing.assert_array_equal(part, np.arange(13) / 2)
    pack(ARRAYS, part)
    unpack(part, results)
    for array, result in zip(ARRAYS, results, strict=True):
        np.testing.assert_array_equal(result, array)


def test_any_part_of_a_line_is_found() -> None:
    line, flat = FlatLayout([array.size for array in ARRAYS]), [array.reshape(-1) for array in ARRAYS]
    assert line.length == 13
    for start in range(14):
        for count in range(14 - start):
            found = np.full(count, -1.0)
            for array, part, here in line.segments(start, count):
                assert part.start < part.stop
                found[here] = flat[array][part]
            assert found.tolist() == list(range(start, start + count))
