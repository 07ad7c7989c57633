"""Collectives between hosts, with each rank of this session as a host of its own, and in shared memory, against MPI.

Hosts of several ranks are in tests/jobs/test_two_hosts.py, and the ranks of one host in tests/unit/test_two_shot.py and
tests/unit/test_shared_memory_data.py, too.
"""

import gc
import itertools
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from mpistrat.api.group import backends_over
from mpistrat.core.arithmetic import Reduction, Scale
from mpistrat.core.error_feedback import ErrorFeedback
from mpistrat.core.errors import StallError
from mpistrat.core.interfaces import DataPlane
from mpistrat.core.interruption import Interruption
from mpistrat.core.request import ReduceOp
from mpistrat.core.rows import rows_of_ranks
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.core.tuning import EAGER_MESSAGE_BYTES, MPI_CHUNK_BYTES
from mpistrat.transport.hierarchical.allreduce import HierarchicalData
from mpistrat.transport.host_link import HostLink
from mpistrat.transport.mpi import mpi_data as mpi
from mpistrat.transport.mpi.control import MpiControl
from mpistrat.transport.mpi.mpi_data import MpiData
from mpistrat.transport.mpi.requests import PeerWait, exchange
from mpistrat.transport.unix_socket import UnixSocketChannel

from ..support.levels import sample
from ..support.planes import hosts_of_one_rank, over_mpi, waits
from ..support.shared_memory_of_threads import host_memories

CHUNK = 64 * 1024
# In float32: nothing, less than an element per host, one exchange of whole slices, a scatter and a gather in one chunk,
# as many chunks as there is memory for, more, and more than a piece of MpiData.
SIZES = [0, 1, 2, 1000, CHUNK // 4, HierarchicalData.slots * CHUNK // 4, 20 * CHUNK // 4 + 7, MPI_CHUNK_BYTES // 2 + 7]


@pytest.fixture(scope="module", params=["hierarchical", "mpi"])
def plane(request: pytest.FixtureRequest) -> Iterator[DataPlane]:
    """What reduces between hosts: with shared memory within them, of one rank each here, and without."""
    between: DataPlane = over_mpi()
    if request.param == "hierarchical":
        between = in_chunks(between)
    yield between
    between.close()


def in_chunks(others: DataPlane, limit_s: float = 60.0) -> HierarchicalData:
    """The plane of all ranks, each on a host of its own; what it passes on is served by `others`."""
    memory, = host_memories([MPI.COMM_WORLD.Get_rank()], HierarchicalData.memory_bytes(1, CHUNK), limit_s)
    return HierarchicalData(memory, CHUNK, others, MPI.COMM_WORLD.Dup(), 1, waits(limit_s),
                            ErrorFeedback(others, hosts_of_one_rank()))


def values(rank: int, size: int) -> np.ndarray:
    """What a rank brings: numbers of which the sum depends on the order."""
    return np.random.default_rng([rank, size]).normal(size=size).astype(np.float32)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_hosts_are_combined_in_their_order(plane: DataPlane, rank: int, size: int, elements: int, op: ReduceOp) -> None:
    result = np.empty(elements, np.float32)
    plane.allreduce([values(rank, elements)], [result], Reduction(op))
    expected = values(0, elements)
    for other in range(1, size):
        expected = (np.add if op is ReduceOp.SUM else np.maximum)(expected, values(other, elements))
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_tensors_larger_and_smaller_than_a_chunk_are_reduced_where_they_are(plane: DataPlane, rank: int, size: int,
                                                                            dtype: str, is_in_place: bool) -> None:
    counts = [CHUNK, 20_000, 9_000, 5 * CHUNK + 3, 17_000]
    brought = [[(100 * values(r, count)).astype(dtype) for count in counts] for r in range(size)]
    sources = [array.copy() for array in brought[rank]]
    targets = sources if is_in_place else [np.empty_like(source) for source in sources]
    plane.allreduce(sources, targets, Reduction(ReduceOp.SUM, 1.0, Scale(1.0, size)))
    for i, target in enumerate(targets):
        total = brought[0][i].astype(np.float32) if dtype == "float16" else brought[0][i].copy()
        for r in range(1, size):
            total += brought[r][i]
        expected = np.empty_like(target)
        Scale(1.0, size).apply(total, expected)
        assert target.tobytes() == expected.tobytes()
        assert is_in_place or sources[i].tobytes() == brought[rank][i].tobytes()


class SmallInts:
    """A communicator of an MPI whose ints end at `most`."""

    def __init__(self, comm: MPI.Comm, most: int):
        self._comm, self._most = comm, most

    def Ialltoallv(self, sent: list, received: list) -> MPI.Request:  # noqa: N802
        for _, counts, places, _ in (sent, received):
            assert max(*counts, *places) <= self._most
        return self._comm.Ialltoallv(sent, received)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def test_what_is_large_goes_over_mpi_in_pieces(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plane = MpiData(SmallInts(MPI.COMM_WORLD.Dup(), 2000), waits())
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
    source, target = np.arange(1003 * size) + 10**6 * rank, np.empty(1003 * size, np.int64)
    own = np.arange(1003 * rank, 1003 * (rank + 1))
    plane.alltoall(source, target, [1003] * size, [1003] * size, 1003)
    np.testing.assert_array_equal(target, np.concatenate([own + 10**6 * sender for sender in range(size)]))
    first = sum(range(rank))  # Rank r gets r elements from each rank.
    plane.alltoall(source, target[:rank * size], list(range(size)), [rank] * size, size - 1)
    np.testing.assert_array_equal(target[:rank * size].reshape(size, rank),
                                  np.arange(first, first + rank) + 10**6 * np.arange(size)[:, None])
    plane.reducescatter(source, target[:1003], [1003] * size, Reduction(ReduceOp.SUM))
    np.testing.assert_array_equal(target[:1003], own * size + 10**6 * sum(range(size)))
    plane.close()


# -- reduce-scatters and all-to-alls, in shared memory and over MPI ----------------------------------------------------

SCATTERED = ["float32", "float64", "float16", "bfloat16", "int32", "uint8"]


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[str, DataPlane]]:
    """The plane of ranks of one host, those of ranks of several hosts, and that over MPI alone."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    host_of = {"one host": ("here",) * size, "two hosts": ("here",) * (size - size // 2) + ("there",) * (size // 2),
               "hosts of one rank": hosts_of_one_rank().host_of}
    backends = {name: backends_over(MPI.COMM_WORLD, Topology(rank, hosts), Settings(), Interruption())
                for name, hosts in host_of.items()}
    alone = over_mpi()
    yield {"mpi": alone, **{name: one.data for name, one in backends.items()}}
    for one in backends.values():
        one.close()
    alone.close()


def random_sizes(seed: int, count: int) -> Iterator[tuple[int, np.random.Generator]]:
    """Numbers of elements of all magnitudes up to 4 million, the same on all ranks, and a generator for the rest."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield int(2 ** random.uniform(-1, 22)), random


def test_the_planes_of_ranks_of_one_host_are_those_that_the_tests_mean(planes: dict[str, DataPlane], size: int) -> None:
    if size > 1:
        assert planes["one host"].name == "shared_memory"
        assert planes["two hosts"].name == planes["hosts of one rank"].name == "hierarchical"


@sample("dtype", SCATTERED)
def test_every_plane_scatters_the_same_bits(planes: dict[str, DataPlane], rank: int, size: int, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for elements, random in random_sizes(SCATTERED.index(dtype), 25):
        counts = rows_of_ranks(elements, size)
        if random.random() < 0.5:
            bounds = [0, *sorted(random.integers(0, elements + 1, size - 1).tolist()), elements]
            counts = [stop - start for start, stop in itertools.pairwise(bounds)]
        op = [ReduceOp.SUM, ReduceOp.MAX][int(random.integers(2))]
        reduction = Reduction(op, *[(1.0, Scale()), (0.5, Scale()), (1.0, Scale(3.0, size))][int(random.integers(3))])
        inputs = [np.abs(10 * values(r, elements)).astype(kind) for r in range(size)]
        source = inputs[rank]
        parts = {}
        for name, plane in planes.items():
            parts[name] = np.empty(counts[rank], kind)
            plane.reducescatter(source, parts[name], counts, reduction)
            assert parts[name].tobytes() == parts["mpi"].tobytes(), (name, elements, counts, op)
        whole, start = np.empty_like(source), sum(counts[:rank])
        planes["one host"].allreduce([source], [whole], reduction)
        assert whole[start:start + counts[rank]].tobytes() == parts["mpi"].tobytes(), (elements, counts, op)
        expected = [array[start:start + counts[rank]].astype(np.float64) for array in inputs]
        if op is ReduceOp.MAX and reduction.prescale == 1.0 and reduction.scale.is_identity:
            np.testing.assert_array_equal(parts["mpi"], np.max(expected, axis=0).astype(kind))
        elif dtype in ("float32", "float64"):
            total = np.sum(expected, axis=0) if op is ReduceOp.SUM else np.max(expected, axis=0)
            factor = reduction.prescale * reduction.scale.factor / reduction.scale.divisor
            np.testing.assert_allclose(parts["mpi"], total * factor, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128"])
def test_every_plane_exchanges_the_same(planes: dict[str, DataPlane], rank: int, size: int, dtype: str) -> None:
    for elements, random in random_sizes(7, 40):
        # Rows of senders, columns of receivers; some parts are empty.
        table = random.integers(0, elements // size // 2 + 2, (size, size)) * (random.random((size, size)) < 0.8)
        sources = [values(sender, int(row.sum()) + 3).astype(dtype) for sender, row in enumerate(table)]
        starts = table[:, :rank].sum(axis=1)
        expected = np.concatenate([source[start:start + count]
                                   for source, start, count in zip(sources, starts, table[:, rank])])
        for name, plane in planes.items():
            target = np.empty(int(table[:, rank].sum()), dtype)
            plane.alltoall(sources[rank], target, table[rank].tolist(), table[:, rank].tolist(), int(table.max()))
            assert target.tobytes() == expected.tobytes(), (name, table)


def test_every_plane_gathers_the_same(planes: dict[str, DataPlane], rank: int, size: int) -> None:
    for elements, random in random_sizes(8, 40):
        counts = (random.integers(0, elements // size + 2, size) * (random.random(size) < 0.8)).tolist()
        expected = np.concatenate([values(r, count) for r, count in enumerate(counts)])
        for name, plane in planes.items():
            target = np.empty(sum(counts), np.float32)
            plane.allgather(values(rank, counts[rank]), target, counts)
            assert target.tobytes() == expected.tobytes(), (name, counts)


class Thing:
    """A request."""


class LosesARank:
    """A communicator of two hosts, the other one of which is lost once this one has received."""

    def __init__(self) -> None:
        self.received: list[weakref.ref[Thing]] = []

    def Get_size(self) -> int:  # noqa: N802
        return 2

    def Get_rank(self) -> int:  # noqa: N802
        return 0

    def Irecv(self, buffer: list, source: int) -> Thing:  # noqa: N802
        thing = Thing()
        self.received.append(weakref.ref(thing))
        return thing

    def Isend(self, buffer: list, dest: int) -> Thing:  # noqa: N802
        raise MPI.Exception(MPI.ERR_OTHER)


def test_what_has_begun_when_a_rank_is_lost_keeps_its_memory() -> None:
    comm, arrays = LosesARank(), [np.zeros(EAGER_MESSAGE_BYTES * 2)] * 2
    with pytest.raises(MPI.Exception):
        exchange(comm, arrays, arrays)  # type: ignore[arg-type]
    gc.collect()
    assert len(comm.received) == 16 and all(each() is not None for each in comm.received)


# -- waits have an end ------------------------------------------------------------------------------------------------

LARGE = 2**16
CALLS = {
    "small all-reduce": lambda plane, size: plane.allreduce([np.ones(3)], [np.ones(3)], Reduction(ReduceOp.SUM)),
    "all-reduce": lambda plane, size: plane.allreduce([np.ones(LARGE)], [np.ones(LARGE)], Reduction(ReduceOp.SUM)),
    "allgather": lambda plane, size: plane.allgather(np.ones(5), np.ones(5 * size), [5] * size),
    "all-to-all": lambda plane, size: plane.alltoall(np.ones(size), np.ones(size), [1] * size, [1] * size, 1),
    "reduce-scatter": lambda plane, size: plane.reducescatter(np.ones(size), np.ones(1), [1] * size,
                                                              Reduction(ReduceOp.SUM)),
    "broadcast": lambda plane, size: plane.broadcast(np.ones(5), size - 1),
}


@pytest.mark.parametrize("is_in_chunks", [False, True], ids=["mpi", "hierarchical"])
@pytest.mark.parametrize("call", CALLS)
def test_a_collective_to_which_others_do_not_come_ends_with_their_hosts(rank: int, size: int, call: str,
                                                                        is_in_chunks: bool) -> None:
    if size == 1:
        pytest.skip("needs another rank")
    plane: DataPlane = over_mpi(0.2)
    if is_in_chunks:
        plane = in_chunks(plane, 0.2)
    began = time.thread_time()
    if rank == 0:
        with pytest.raises(StallError, match=r"rank 0 on host0 has waited 0 s for ranks \[1\] on host1.* Either the "
                                             "network between the hosts host0(,| and) host1"):
            CALLS[call](plane, size)
        assert time.thread_time() - began < 0.1  # It has slept, mostly.
    MPI.COMM_WORLD.Barrier()


class FullMail:
    """A channel in which all messages to one rank wait for room."""

    def __init__(self, rank: int):
        self._rank = rank

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
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


@pytest.fixture
def channel(rank: int) -> Iterator[UnixSocketChannel]:
    """That of a rank which is alone on its host."""
    with closing(HostLink(rank, [rank])) as link, closing(link.connect(link.invitation)) as opened:
        yield opened


class AnnouncedOnly(MPI.Intracomm):
    """A communicator on which a large message of the next rank is announced, and never arrives."""

    def __init__(self, comm: MPI.Intracomm):
        self.pending: list[MPI.Request] = []  # The receives of this rank.

    def Iprobe(self, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG,  # noqa: N802
               status: MPI.Status | None = None) -> bool:
        """True until the message is received."""
        if status is not None:
            status.Set_source((self.Get_rank() + 1) % self.Get_size())
            status.Set_elements(MPI.BYTE, LARGE)
        return not self.pending

    def Recv(self, *args: object, **kwargs: object) -> None:  # noqa: N802
        """It would never return."""
        pytest.fail("a blocking receive has no limit")

    def Irecv(self, *args: Any, **kwargs: Any) -> MPI.Request:  # noqa: N802
        self.pending.append(super().Irecv(*args, **kwargs))
        return self.pending[-1]


def test_a_message_that_is_announced_and_does_not_arrive_ends_with_its_sender(channel: UnixSocketChannel, rank: int,
                                                                             size: int) -> None:
    if size == 1:
        pytest.skip("needs another rank")
    comm, sender = AnnouncedOnly(MPI.COMM_WORLD.Dup()), (rank + 1) % size
    control = MpiControl(comm, channel, [rank], range(size), wait=waits(0.2))
    with pytest.raises(StallError, match=rf"rank {rank} on host{rank} has waited 0 s for ranks \[{sender}\] on "
                                         rf"host{sender}\. Either the network between the hosts host{rank} and "
                                         rf"host{sender} is down or loses what is sent; or the engine"):
        control.poll()
    request, = comm.pending
    request.Cancel()
    request.Wait()
    MPI.COMM_WORLD.Barrier()  # Until all have cancelled, nothing is sent.
    comm.Free()


def test_large_and_small_messages_between_hosts_arrive_in_order(channel: UnixSocketChannel, rank: int,
                                                                size: int) -> None:
    sizes = [3, 2**20, 0, 5, 2**17]
    control = MpiControl(MPI.COMM_WORLD.Dup(), channel, [rank], range(size), wait=waits())
    others = [other for other in range(size) if other != rank]
    for nbytes in sizes:
        for other in others:
            control.send(other, bytes([rank + 1]) * nbytes)
    received: dict[int, list[bytes]] = {other: [] for other in others}
    while any(len(messages) < len(sizes) for messages in received.values()):
        for source, message in control.poll():
            received[source].append(message)
    control.flush(others)
    assert received == {other: [bytes([other + 1]) * nbytes for nbytes in sizes] for other in others}
    control.close()
