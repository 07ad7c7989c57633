"""All-reduces between hosts, with each rank of this session as a host of its own.

Hosts of several ranks are in tests/test_two_hosts.py, and the ranks of one host in tests/unit/test_shared_memory.py.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.collectives.base import DataPlane
from mpistrat.collectives.freight import Freight
from mpistrat.collectives.hierarchical import HierarchicalData
from mpistrat.collectives.mpi import CHUNK_BYTES, MpiData
from mpistrat.messages import ReduceOp
from mpistrat.scale import IDENTITY, Scale

from ..shared_memory_of_threads import shared_results

CHUNK = 64 * 1024
# In float32: nothing, less than an element per host, one exchange of whole slices, a scatter and a gather in one chunk,
# as many chunks as there is memory for, more, and more than a piece of MpiData.
SIZES = [0, 1, 2, 1000, CHUNK // 4, HierarchicalData.slots * CHUNK // 4, 20 * CHUNK // 4 + 7, CHUNK_BYTES // 2 + 7]


@pytest.fixture(scope="module", params=["hierarchical", "mpi"])
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlane]:
    """What reduces between hosts: with shared memory within them, of one rank each here, and without."""
    between: DataPlane = MpiData(MPI.COMM_WORLD.Dup())
    if request.param == "hierarchical":
        nbytes = HierarchicalData.memory_bytes(1, CHUNK)
        (memory, results), = shared_results([MPI.COMM_WORLD.Get_rank()], nbytes, 60.0)
        between = HierarchicalData(memory, CHUNK, between, results, MPI.COMM_WORLD.Dup(), 1, 60.0)
    yield between
    between.close()


def values(rank: int, size: int) -> np.ndarray:
    """What a rank brings: numbers of which the sum depends on the order."""
    return np.random.default_rng([rank, size]).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_hosts_are_combined_in_their_order(plane: DataPlane, rank: int, size: int, elements: int,
                                           op: ReduceOp) -> None:
    result = np.empty(elements, np.float32)
    plane.allreduce([values(rank, elements)], [result], op, 1.0, IDENTITY)
    expected = values(0, elements)
    for other in range(1, size):
        expected = (np.add if op is ReduceOp.SUM else np.maximum)(expected, values(other, elements))
    np.testing.assert_array_equal(result, expected)


def test_a_list_is_averaged_in_place(plane: DataPlane, rank: int, size: int) -> None:
    shapes = [(3, 5), (), (0, 4), (70_000,), (2, 3, 4), (5000,)]
    arrays = [np.full(shape, rank + k, np.float64) for k, shape in enumerate(shapes)]
    plane.allreduce(arrays, arrays, ReduceOp.SUM, 2.0, Scale(1.0, size))
    for k, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.full(shapes[k], 2.0 * sum(range(k, k + size)) / size))


def test_halves_are_summed_in_float32(plane: DataPlane, size: int) -> None:
    large = np.full(50_000, 60000, np.float16)
    result = np.empty_like(large)
    plane.allreduce([large], [result], ReduceOp.SUM, 1.0, Scale(1.0, size))
    np.testing.assert_array_equal(result, large)


@pytest.mark.parametrize("elements", [1000, CHUNK // 4, 20 * CHUNK // 4 + 7])
def test_hosts_may_differ_in_whether_results_are_lent(plane: DataPlane, rank: int, size: int, elements: int) -> None:
    lends, lent_before = rank != 1, 0
    for step in range(8):
        source = np.full(elements, float(step + rank))
        lent, = plane.lend([[source]], lends)
        lent_before += lent is not None
        result, = [np.empty_like(source)] if lent is None else lent
        plane.allreduce([source], [result], ReduceOp.SUM, 1.0, Scale(6.0, size))
        np.testing.assert_array_equal(result, np.full(elements, 6.0 * (step + (size - 1) / 2)))
        del lent, result
    assert (lent_before > 2) == (lends and isinstance(plane, HierarchicalData))


def test_what_was_packed_for_a_vote_is_reduced_without_it_as_well(rank: int, size: int) -> None:
    nbytes, each = HierarchicalData.memory_bytes(1, CHUNK), CHUNK
    (memory, results), = shared_results([rank], nbytes, 60.0)
    freight = Freight(memoryview(bytearray(Freight.memory_bytes(1, each))), 0, 1, each)
    plane = HierarchicalData(memory, CHUNK, MpiData(MPI.COMM_WORLD.Dup()), results, MPI.COMM_WORLD.Dup(), 1, 60.0,
                             freight)
    for elements in (1000, each // 4, each // 4 + 1):
        source = values(rank, elements)
        voted_for, plain = np.empty_like(source), np.empty_like(source)
        prepared = plane.prepare([source], [voted_for], ReduceOp.SUM, 1.0, Scale(1.0, size))
        assert prepared.is_packed == (elements * 4 <= each)
        plane.finish(prepared, all_packed=False)
        plane.allreduce([source], [plain], ReduceOp.SUM, 1.0, Scale(1.0, size))
        np.testing.assert_array_equal(voted_for, plain)
    plane.close()
