"""All-reduces between hosts, with each rank of this session as a host of its own.

Hosts of several ranks are in tests/jobs/test_two_hosts.py, and the ranks of one host in tests/unit/test_two_shot.py.
"""

import time
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.core.arithmetic import Reduction, Scale
from mpistrat.core.errors import StallError
from mpistrat.core.interfaces import DataPlane, Outcome
from mpistrat.core.request import ReduceOp
from mpistrat.core.topology import Topology
from mpistrat.core.tuning import MPI_CHUNK_BYTES
from mpistrat.transport.hierarchical.agreement import HierarchicalAgreement
from mpistrat.transport.hierarchical.allreduce import HierarchicalData
from mpistrat.transport.hierarchical.leader_exchange import leader_exchange
from mpistrat.transport.hierarchical.piggyback import Piggyback
from mpistrat.transport.mpi import data as mpi
from mpistrat.transport.mpi.control import MpiControl
from mpistrat.transport.mpi.data import MpiData
from mpistrat.transport.mpi.peer_wait import PeerWait

from ..support.shared_memory_of_threads import host_memories

CHUNK = 64 * 1024
# In float32: nothing, less than an element per host, one exchange of whole slices, a scatter and a gather in one chunk,
# as many chunks as there is memory for, more, and more than a piece of MpiData.
SIZES = [0, 1, 2, 1000, CHUNK // 4, HierarchicalData.slots * CHUNK // 4, 20 * CHUNK // 4 + 7, MPI_CHUNK_BYTES // 2 + 7]


def waits(limit_s: float = 60.0) -> PeerWait:
    """Those of this rank for all others, each on a host of its own."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    return PeerWait(Topology(rank, tuple(f"host{r}" for r in range(size))), range(size), limit_s)


@pytest.fixture(scope="module", params=["hierarchical", "mpi"])
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlane]:
    """What reduces between hosts: with shared memory within them, of one rank each here, and without."""
    between: DataPlane = MpiData(MPI.COMM_WORLD.Dup())
    if request.param == "hierarchical":
        nbytes = HierarchicalData.memory_bytes(1, CHUNK)
        memory, = host_memories([MPI.COMM_WORLD.Get_rank()], nbytes, 60.0)
        between = HierarchicalData(memory, CHUNK, between, MPI.COMM_WORLD.Dup(), 1, waits())
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
    plane.allreduce([values(rank, elements)], [result], Reduction(op))
    expected = values(0, elements)
    for other in range(1, size):
        expected = (np.add if op is ReduceOp.SUM else np.maximum)(expected, values(other, elements))
    np.testing.assert_array_equal(result, expected)


def test_a_list_is_averaged_in_place(plane: DataPlane, rank: int, size: int) -> None:
    shapes = [(3, 5), (), (0, 4), (70_000,), (2, 3, 4), (5000,)]
    arrays = [np.full(shape, rank + k, np.float64) for k, shape in enumerate(shapes)]
    plane.allreduce(arrays, arrays, Reduction(ReduceOp.SUM, 2.0, Scale(1.0, size)))
    for k, array in enumerate(arrays):
        np.testing.assert_array_equal(array, np.full(shapes[k], 2.0 * sum(range(k, k + size)) / size))


def test_halves_are_summed_in_float32(plane: DataPlane, size: int) -> None:
    large = np.full(50_000, 60000, np.float16)
    result = np.empty_like(large)
    plane.allreduce([large], [result], Reduction(ReduceOp.SUM, 1.0, Scale(1.0, size)))
    np.testing.assert_array_equal(result, large)


@pytest.fixture
def voting(rank: int, size: int) -> Iterator[tuple[HierarchicalData, HierarchicalAgreement]]:
    """A plane whose small all-reduces travel with votes, with this rank as one of so many hosts."""
    each = 8 * CHUNK
    memory, = host_memories([rank], HierarchicalData.memory_bytes(1, CHUNK), 60.0)
    piggyback = Piggyback(memoryview(bytearray(Piggyback.memory_bytes(1, each))), 0, 1, each)
    vote = leader_exchange(MPI.COMM_WORLD, Topology(rank, tuple(f"host {h}" for h in range(size))), piggyback)
    agreement = HierarchicalAgreement(memory, lambda other: None, vote,
                                      [other for other in range(size) if other != rank])
    plane = HierarchicalData(memory, CHUNK, MpiData(MPI.COMM_WORLD.Dup()), MPI.COMM_WORLD.Dup(), 1, waits(), piggyback)
    yield plane, agreement
    agreement.close()
    plane.close()


def reduce_by_vote(plane: HierarchicalData, agreement: HierarchicalAgreement, sources: list[np.ndarray],
                   targets: list[np.ndarray],
                   is_ready: bool = True) -> Outcome:
    """The average of `sources`, by the way that all ranks have voted for."""
    prepared = plane.prepare(sources, targets, Reduction(ReduceOp.SUM, 1.0, Scale(1.0, MPI.COMM_WORLD.Get_size())))
    agreement.vote(5, prepared.is_packed and is_ready)
    outcome = None
    while outcome is None:
        outcome = agreement.outcome()
    plane.finish(prepared, outcome is Outcome.ALL_READY)
    return outcome


def test_what_travels_with_votes_is_the_same_as_what_does_not(voting: tuple[HierarchicalData, HierarchicalAgreement],
                                                              rank: int,
                                                              size: int) -> None:
    plane, agreement = voting
    for elements in (1000, CHUNK // 4, 2 * CHUNK, 2 * CHUNK + 1):
        source = values(rank, elements)
        results = [np.empty_like(source) for _ in range(3)]
        fits = source.nbytes <= 8 * CHUNK
        outcomes = [reduce_by_vote(plane, agreement, [source], [results[0]]),
                    reduce_by_vote(plane, agreement, [source], [results[1]], is_ready=rank != size - 1)]
        assert outcomes == [Outcome.ALL_READY if fits else Outcome.AGREED, Outcome.AGREED]
        plane.allreduce([source], [results[2]], Reduction(ReduceOp.SUM, 1.0, Scale(1.0, size)))
        np.testing.assert_array_equal(results[0], results[2])
        np.testing.assert_array_equal(results[1], results[2])


def test_what_is_large_is_gathered_and_broadcast_in_pieces(rank: int, size: int,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    plane = MpiData(MPI.COMM_WORLD.Dup())
    monkeypatch.setattr(mpi, "MPI_PIECE_BYTES", 1000)
    counts = [0, 7, 3000, 126, 125][:size]
    for large_bytes in (mpi.LARGE_BYTES, 2000):
        monkeypatch.setattr(mpi, "LARGE_BYTES", large_bytes)
        target = np.empty(sum(counts))
        plane.allgather(values(rank, counts[rank]).astype(float), target, counts)
        np.testing.assert_array_equal(target, np.concatenate([values(r, count) for r, count in enumerate(counts)]))
    array = values(rank, 3001)
    plane.broadcast(array, size - 1)
    np.testing.assert_array_equal(array, values(size - 1, 3001))
    plane.close()


# -- waits have an end ------------------------------------------------------------------------------------------------

LARGE = 2**16
CALLS = {
    "small all-reduce": lambda plane, size: plane.allreduce([np.ones(3)], [np.ones(3)], Reduction(ReduceOp.SUM)),
    "all-reduce": lambda plane, size: plane.allreduce([np.ones(LARGE)], [np.ones(LARGE)], Reduction(ReduceOp.SUM)),
    "allgather": lambda plane, size: plane.allgather(np.ones(5), np.ones(5 * size), [5] * size),
    "broadcast": lambda plane, size: plane.broadcast(np.ones(5), size - 1),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_collective_to_which_others_do_not_come_ends_with_their_hosts(rank: int, size: int, call: str) -> None:
    if size == 1:
        pytest.skip("needs another rank")
    plane = MpiData(MPI.COMM_WORLD.Dup(), waits(0.2))
    began = time.thread_time()
    if rank == 0:
        with pytest.raises(StallError, match=r"rank 0 on host0 has waited 0 s for ranks \[1\] on host1.* Either the "
                                             "network between the hosts host0 and host1"):
            CALLS[call](plane, size)
        assert time.thread_time() - began < 0.1  # It has slept, mostly.
    MPI.COMM_WORLD.Barrier()


class FullMail:
    """A mailbox in which all that is sent to one rank waits for room."""

    def __init__(self, rank: int):
        self._rank = rank

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """See Mail."""
        return self._rank in ranks

    def flush(self) -> None:
        """See Mail."""


def test_a_rank_that_takes_no_messages_is_named_after_the_limit(rank: int, size: int) -> None:
    topology = Topology(rank, ("here",) * (size + 2))
    wait = PeerWait(topology, range(size + 2), 0.2)
    control = MpiControl(MPI.COMM_WORLD, FullMail(size), range(size + 2), [], wait=wait)  # type: ignore[arg-type]
    control.flush([size + 1])
    with pytest.raises(StallError, match=rf"rank {rank} has waited 0 s for ranks \[{size}\]\."):
        control.flush([size, size + 1])
