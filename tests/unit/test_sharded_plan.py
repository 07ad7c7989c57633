"""The division of variables among ranks: every element has one rank, and the ranks have as many bytes."""

import random

import pytest

pytest.importorskip("keras")

from mpistrat.keras.sharded.parts import Plan, Planned, plan_of


def tensor(*shape: int, dtype: str = "float32") -> Planned:
    return Planned(shape, dtype, 2 if dtype == "float16" else 4)


def bytes_of_ranks(plan: Plan, tensors: list[Planned]) -> list[int]:
    return [sum(part.size * tensors[place].itemsize for place, part in plan.parts(rank).items())
            for rank in range(plan.size)]


def assert_whole(plan: Plan, tensors: list[Planned]) -> None:
    """Each variable is in one block, and its parts follow one another in the order of the ranks."""
    members = [member for bucket in plan.buckets for block in bucket for member in block.members]
    assert sorted(members) == list(range(len(tensors)))
    for place, each in enumerate(tensors):
        end = 0
        for rank in range(plan.size):
            part = plan.parts(rank)[place]
            assert part.start == (end if part.size else part.start) and part.size % part.width == 0
            end = part.stop if part.size else end
        assert end == each.size
    for bucket in plan.buckets:
        for block in bucket:
            assert sum(block.sizes) == sum(block.rows) * block.width
            for rank in range(plan.size):
                assert sum(part.size for part in block.parts(rank)) == block.rows[rank] * block.width


@pytest.mark.parametrize("is_split", [True, False], ids=["parts", "whole"])
def test_every_element_has_one_rank(is_split: bool) -> None:
    draw = random.Random(5)
    for _ in range(200):
        shapes = [[draw.randint(1, 40) for _ in range(draw.randint(0, 3))] for _ in range(draw.randint(1, 12))]
        tensors = [tensor(*shape, dtype=draw.choice(("float32", "float16"))) for shape in shapes]
        plan = plan_of(tensors, draw.randint(2, 5), is_split, bucket_bytes=draw.choice((1, 4000, 10**6)),
                       small_bytes=draw.choice((0, 1000, 10**6)))
        assert_whole(plan, tensors)


def test_one_rank_may_have_all() -> None:
    tensors = [tensor(3, 4), tensor(), tensor(9, dtype="float16")]
    plan = plan_of(tensors, 3, False, owner=1)
    assert_whole(plan, tensors)
    assert bytes_of_ranks(plan, tensors) == [0, 48 + 4 + 18, 0]


def test_the_ranks_have_as_many_bytes() -> None:
    # BERT-base: an embedding, and twelve layers of matrices and vectors.
    layer = [tensor(768, 768), tensor(768)] * 4 + [tensor(768, 3072), tensor(3072), tensor(3072, 768), tensor(768)]
    tensors = [tensor(30522, 768), tensor(512, 768), *layer * 12]
    for size in (2, 3, 8):
        for is_split, most in ((True, 1.001), (False, 1.4 if size == 8 else 1.05)):
            loads = bytes_of_ranks(plan_of(tensors, size, is_split), tensors)
            assert max(loads) <= most * sum(loads) / size or (not is_split and max(loads) == tensors[0].nbytes)


def test_large_matrices_are_divided_between_rows_and_small_tensors_together() -> None:
    tensors = [tensor(1000, 30), tensor(3, 3, 64, 64), tensor(7), tensor(4)]
    (matrix, kernel, together), = [sorted(bucket, key=lambda block: block.members) for bucket in
                                   plan_of(tensors, 3, True).buckets]
    assert (matrix.members, matrix.width, matrix.rows) == ((0,), 30, (334, 333, 333))
    assert (kernel.members, kernel.width, kernel.rows) == ((1,), 1, (12288, 12288, 12288))
    assert (together.members, together.rows) == ((3, 2), (4, 4, 3))


def test_whole_variables_go_to_the_rank_with_the_fewest_bytes() -> None:
    tensors = [tensor(10), tensor(50), tensor(30), tensor(20)]
    plan = plan_of(tensors, 2, False)
    assert [{place for place, part in plan.parts(rank).items() if part.size} for rank in range(2)] == [{1, 0}, {2, 3}]
