"""Reduce-scatters, all-to-alls and all-gathers in shared memory, with threads in the place of ranks."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError, StallError
from mpistrat.core.interfaces import DataPlane
from mpistrat.core.request import ReduceOp
from mpistrat.transport.shm.shm_data import SharedMemoryData
from tests.support.thread_group import ThreadGroup

from ..support.shared_memory_of_threads import shared_memory_planes
from ..support.threads import on_all

LIMIT_S = 20.0
CHUNK = 4096
MEMORY = SharedMemoryData.slots * CHUNK  # bytes that each rank writes to
# Elements in all: none, fewer than ranks, one-shot, the limit of that, several chunks, and more than the memory.
SIZES = [0, 1, 7, 1000, MEMORY // 4, MEMORY // 4 + 1, 5 * MEMORY // 4 + 3]


def planes(count: int, limit_s: float = LIMIT_S) -> list[SharedMemoryData]:
    """The data plane of each of `count` ranks; what does not fit is served by a ThreadGroup."""
    group = ThreadGroup(count, LIMIT_S)
    return shared_memory_planes(list(range(count)), [CHUNK], [group.data(i) for i in range(count)], limit_s)


def random_counts(random: np.random.Generator, total: int, count: int) -> list[int]:
    """`count` numbers with this sum, some of them 0."""
    bounds = np.sort(random.integers(0, total + 1, count - 1)).tolist()
    return [stop - start for start, stop in zip([0, *bounds], [*bounds, total])]


def normal(rank: int, size: int, dtype: Any = np.float32) -> np.ndarray:
    """Values of a rank, of which the sum depends on the order."""
    return (100 * np.random.default_rng([rank, size]).normal(size=size)).astype(dtype)


def scattered(data: DataPlane, source: np.ndarray, counts: list[int], index: int, reduction: Reduction) -> np.ndarray:
    target = np.empty(counts[index], source.dtype)
    data.reducescatter(source, target, counts, reduction)
    return target


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("prescale", "scale"), [(1.0, IDENTITY), (0.3, Scale(3.0, 4))], ids=["sum", "scaled"])
def test_a_part_has_the_bits_of_the_allreduce(count: int, prescale: float, scale: Scale) -> None:
    data, reduction = planes(count), Reduction(ReduceOp.SUM, prescale, scale)

    def work(index: int) -> None:
        random = np.random.default_rng(0)
        for size, dtype in itertools.product(SIZES, (np.float32, np.float16)):
            counts = random_counts(random, size, count)
            whole, source = np.empty(size, dtype), normal(index, size, dtype)
            data[index].allreduce([source], [whole], reduction)
            start = sum(counts[:index])
            np.testing.assert_array_equal(scattered(data[index], source, counts, index, reduction),
                                          whole[start:start + counts[index]])

    on_all(count, work)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64", "float16", "bfloat16", "float64",
                                   "complex128", "longdouble"])
def test_every_dtype_is_scattered(dtype: str) -> None:
    kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    data = planes(3)
    for size in (10, MEMORY):
        inputs = [(np.arange(size) % 5 + rank).astype(kind) for rank in range(3)]
        expected = sum(array.astype(np.complex128 if kind.kind == "c" else np.float64) for array in inputs)
        results = on_all(3, lambda index, size=size, inputs=inputs: scattered(  # type: ignore[misc]
            data[index], inputs[index], [size - 3, 1, 2], index, Reduction(ReduceOp.SUM)))
        np.testing.assert_array_equal(np.concatenate(results), expected.astype(kind))


def exchanged(data: DataPlane, index: int, table: np.ndarray, dtype: Any = np.float32) -> None:
    """Do an all-to-all of a table of counts, sender by receiver, and compare it with numpy."""
    sources = [normal(sender, int(row.sum()) + 2, dtype) for sender, row in enumerate(table)]
    target = np.empty(int(table[:, index].sum()), dtype)
    data.alltoall(sources[index], target, table[index].tolist(), table[:, index].tolist(), int(table.max()))
    starts = table[:, :index].sum(axis=1)
    np.testing.assert_array_equal(target, np.concatenate(
        [source[start:start + size] for source, start, size in zip(sources, starts, table[:, index])]))


def test_one_large_part_of_one_rank_is_passed_on_by_all() -> None:
    data = planes(3)
    for sender, receiver in ((0, 1), (2, 0), (1, 1)):
        table = np.ones((3, 3), np.int64)
        table[sender, receiver] = MEMORY
        on_all(3, lambda index, table=table: exchanged(data[index], index, table))  # type: ignore[misc]


def test_collectives_of_all_kinds_find_the_memory_free() -> None:
    data = planes(3)

    def work(index: int) -> None:
        random = np.random.default_rng(3)
        for step in range(200):
            size, kind = int(random.integers(0, MEMORY)), step * 7 % 4
            source, whole = np.full(size, step + index, np.float64), np.empty(size)
            if kind == 0:
                data[index].allreduce([source], [whole], Reduction(ReduceOp.SUM))
                assert (whole == 3 * step + 3).all()
            elif kind == 1:
                counts = random_counts(random, size, 3)
                part = scattered(data[index], source, counts, index, Reduction(ReduceOp.SUM))
                assert (part == 3 * step + 3).all()
            elif kind == 2:
                exchanged(data[index], index, random.integers(0, size // 4 + 1, (3, 3)))
            else:
                gathered = np.empty(3 * size)
                data[index].allgather(source, gathered, [size] * 3)
                assert (gathered.reshape(3, -1) == np.arange(step, step + 3)[:, None]).all()

    on_all(3, work)


CALLS: dict[str, Callable[[DataPlane, int], None]] = {
    "small reduce-scatter": lambda data, n: data.reducescatter(np.ones(2), np.ones(1), [1, 1], Reduction(ReduceOp.SUM)),
    "reduce-scatter": lambda data, n: data.reducescatter(np.ones(2 * n), np.ones(n), [n, n], Reduction(ReduceOp.SUM)),
    "all-reduce": lambda data, n: data.allreduce([np.ones(2 * n)], [np.ones(2 * n)], Reduction(ReduceOp.SUM)),
    "all-to-all": lambda data, n: data.alltoall(np.ones(2), np.ones(2), [1, 1], [1, 1], 1),
    "all-gather": lambda data, n: data.allgather(np.ones(1), np.ones(2), [1, 1]),
}


@pytest.mark.parametrize("call", CALLS)
def test_waits_end_with_the_rank_that_has_left_or_is_late(call: str) -> None:
    first, second = planes(2)
    second.abandon(is_stalled=False)
    with pytest.raises(EngineError, match=r"^rank 1 has left in the middle of a collective\.$"):
        CALLS[call](first, MEMORY)
    with pytest.raises(StallError, match=r"rank 0 has waited 0 s for ranks \[1\]\."):
        CALLS[call](planes(2, limit_s=0.05)[0], MEMORY)
