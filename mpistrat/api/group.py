"""Group: ranks that run collectives with one another, with their own backends and their own engine.

All ranks of the job are a group. Each process set is a group too, in which the ranks are numbered from 0. Groups share
only the processes and their GPUs. Therefore the collectives of two overlapping process sets need no common order, and
process sets without a common rank never wait for each other. NCCL is an exception, because it needs one order for all
collectives on a GPU. Of overlapping sets, only the first set that has GPU tensors uses NCCL (gpu.assignment).
"""

import contextlib
import hashlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.error_feedback import ErrorFeedback
from ..core.errors import MpistratError
from ..core.interfaces import AgreementRound, ControlPlane, DataPlane, Observer
from ..core.interruption import Interruption
from ..core.request import DEVICE_GPU, Request, allgather_request, specs_of
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import KEPT_REQUESTS, RECORDED_OPERATIONS
from ..engine.controller import Controller
from ..engine.engine import Engine
from ..engine.executor import Executor
from ..engine.not_finite import FiniteWatch
from ..gpu.arrays import GpuTensors
from ..gpu.gpu_executor import GpuExecutor
from ..negotiation.subtree import Node, edges_among
from ..process import error_text
from ..process.procfs import Process
from ..trace.records import OperationRing, Traced
from ..transport.host_link import HostLink
from ..transport.local import LocalAgreement, LocalControl, LocalData
from ..transport.shm.ring import LocalChannel, ShmRing, ring_bytes
from ..transport.shm.segment import HostMemory
from ..transport.unix_socket import UnixSocketChannel

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi.mpi_data import MpiData

logger = logging.getLogger(__name__)

# -- backends, which move messages and CPU arrays among the ranks -----------------------------------------------------

# With several hosts, a wait for a rank of the same host has this much more time than a wait for another host. So the
# rank that waits for the other host reports first, and its error names the cause.
_EXTRA_WAIT_S = 1.0


@dataclass(frozen=True)
class Backends:
    """The backends of one rank."""

    control: ControlPlane  # Sends and receives control messages.
    data: DataPlane  # Reduces, gathers and broadcasts CPU arrays.
    agreement: AgreementRound | None = None  # Agreement rounds for the fast path; None if the fast path is off.
    feedback: ErrorFeedback | None = None  # The rounding errors of transfers between hosts; None for one rank.

    def revoke(self) -> list[Any]:
        """Give up all resources after a loss of ranks. Local. Returns the communicators and requests to discard."""
        return [*self.data.revoke(), *(self.agreement.revoke() if self.agreement is not None else []),
                *self.control.revoke()]

    def close(self) -> None:
        """Release all resources. Collective. Call it when the engine has ended."""
        self.data.close()
        if self.agreement is not None:
            self.agreement.close()
        self.control.close()


@dataclass(frozen=True)
class _Setup:
    """The common arguments of the functions that build backends."""

    comm: "MPI.Intracomm"  # All ranks.
    topology: Topology
    settings: Settings
    link: HostLink  # Shares memory among the ranks of this host.
    channel: UnixSocketChannel  # Messages among the ranks of this host, over sockets.
    mpi: "MpiData"  # Collectives over MPI, for operations that shared memory does not support.
    feedback: ErrorFeedback  # The rounding errors of transfers between hosts.
    interruption: Interruption  # Ends waits for other ranks.

    @property
    def remote_ranks(self) -> list[int]:
        return [rank for rank in range(self.topology.size) if rank not in self.topology.local_ranks]


# The backends for arrays, for messages within the host, and for agreement rounds (None: no fast path).
_Parts = tuple[DataPlane, LocalChannel, AgreementRound | None]


def backends_over(comm: "MPI.Intracomm | None", topology: Topology, settings: Settings,
                  interruption: Interruption) -> Backends:
    """Return this rank's backends for a group with communicator `comm` (None: one rank). Collective over `comm`.

    Shared memory is used within hosts if all ranks can map it, and MPI otherwise. The fast path is used if the ranks of
    each host share memory, or if each host has one rank, unless MPISTRAT_DISABLE=fast_path. A group of one rank does
    not need MPI. `interruption` ends the waits of the backends for other ranks.
    """
    if comm is None:
        return Backends(LocalControl(), LocalData(), LocalAgreement() if settings.uses("fast_path") else None)
    from ..transport.mpi.control import MpiControl
    from ..transport.mpi.mpi_data import MpiData
    from ..transport.mpi.requests import PeerWait
    rank, local_ranks = topology.rank, topology.local_ranks
    link, sockets = _connect_host(comm, topology, interruption)
    wait = PeerWait(topology, range(topology.size), settings.limit_s, interruption)
    mpi = MpiData(comm.Dup(), wait)
    setup = _Setup(comm, topology, settings, link, sockets, mpi, ErrorFeedback(mpi, topology), interruption)
    parts: _Parts | None = None
    with contextlib.closing(link):
        if settings.cpu_operations != "mpi" or max(topology.local_sizes) == 1:
            parts = _build_for_hosts(setup) if setup.remote_ranks else _build_for_one_host(setup)
    data, channel, agreement = parts or (setup.mpi, sockets, None)
    if agreement is not None:
        channel.watch(agreement.has_news)
    leads = agreement is not None and rank == local_ranks[0] and bool(setup.remote_ranks)
    control = MpiControl(comm.Dup(), channel, local_ranks, Node(rank, topology.size).neighbours, wait, leads)
    _log_choice(topology, settings, data, agreement)
    return Backends(control, data, agreement, setup.feedback)


def _build_for_one_host(setup: _Setup) -> _Parts | None:
    """Return backends over shared memory, for ranks of one host; None if they cannot share memory. Collective."""
    from ..transport.shm.segment import SharedMemoryAgreement
    from ..transport.shm.shm_data import SharedMemoryData
    local_ranks, settings = setup.topology.local_ranks, setup.settings
    edges, count = edges_among(local_ranks), len(local_ranks)
    chunks = (settings.chunk_bytes,) if settings.chunk_bytes else SharedMemoryData.chunks_for(count)
    for tried in range(len(chunks), 0, -1):
        plane_bytes = SharedMemoryData.memory_bytes(count, chunks[tried - 1])
        memory = _shared_memory(setup, plane_bytes + ring_bytes(edges), is_last=tried == 1)
        if memory is not None:
            break
    else:
        return None
    channel = ShmRing(memory, plane_bytes, edges, setup.channel)
    agreement = SharedMemoryAgreement(memory, channel.wake_rank) if settings.uses("fast_path") else None
    data = SharedMemoryData(memory, chunks[:tried], setup.mpi)
    data.on_choice = partial(logger.info, "rank %d: %s", setup.topology.job_rank)
    return data, channel, agreement


def _build_for_hosts(setup: _Setup) -> _Parts | None:
    """Return backends for several hosts, with shared memory in each host; None if it cannot be shared. Collective.

    With MPISTRAT_CPU_OPERATIONS=mpi, call it only if each host has one rank. The data backend is then MpiData.
    """
    from ..transport.hierarchical.allreduce import HierarchicalData, cross_comm
    from ..transport.hierarchical.hosts_agreement import HierarchicalAgreement, Piggyback, leader_exchange
    from ..transport.mpi.requests import PeerWait
    topology, settings = setup.topology, setup.settings
    chunk = settings.chunk_bytes or HierarchicalData.chunk_bytes
    count, edges = topology.local_size, edges_among(topology.local_ranks)
    has_pipeline = settings.cpu_operations != "mpi"
    slot_bytes = Piggyback.largest(topology.local_sizes) if settings.uses("fast_path") and has_pipeline else 0
    plane_bytes = HierarchicalData.memory_bytes(count, chunk)
    piggyback_at = plane_bytes + ring_bytes(edges)
    memory = _shared_memory(setup, piggyback_at + Piggyback.memory_bytes(count, slot_bytes))
    if memory is None:
        return None
    channel, agreement, piggyback = ShmRing(memory, plane_bytes, edges, setup.channel), None, None
    if slot_bytes:
        piggyback = Piggyback(memory.data[piggyback_at:], memory.index, count, slot_bytes)
    if settings.uses("fast_path"):
        agreement = HierarchicalAgreement(memory, channel.wake_rank, leader_exchange(setup.comm, topology, piggyback),
                                          setup.remote_ranks)
    if not has_pipeline:
        return setup.mpi, channel, agreement
    cross_wait = PeerWait(topology, topology.cross_ranks, settings.limit_s, setup.interruption)
    data = HierarchicalData(memory, chunk, setup.mpi, cross_comm(setup.comm, topology), min(topology.local_sizes),
                            cross_wait, setup.feedback, piggyback)
    return data, channel, agreement


def _log_choice(topology: Topology, settings: Settings, data: DataPlane, agreement: AgreementRound | None) -> None:
    """Log which backends are used, and why: INFO on rank 0, DEBUG on all other ranks."""
    if settings.cpu_operations == "mpi":
        reason = "MPISTRAT_CPU_OPERATIONS=mpi"
    elif max(topology.local_sizes) == 1:
        reason = "every host has one rank"
    else:
        reason = "memory cannot be shared" if data.name == "mpi" else "the ranks of a host share memory"
    logger.log(logging.DEBUG if topology.rank else logging.INFO,
               "rank %d: CPU tensors are reduced by %s (%s), the fast path is %s", topology.job_rank, data.name, reason,
               "on" if agreement is not None else "off" if settings.uses("fast_path") else
               "off (MPISTRAT_DISABLE=fast_path)")


def _connect_host(comm: "MPI.Intracomm", topology: Topology,
                  interruption: Interruption) -> tuple[HostLink, UnixSocketChannel]:
    """Connect the ranks of each host by sockets. Collective over `comm`. The caller must close the HostLink.

    Raises MpistratError: On all ranks, if the ranks of any host cannot be connected.
    """
    link, channel, problem = None, None, ""
    try:
        link = HostLink(topology.rank, topology.local_ranks,
                        [topology.job_ranks[rank] for rank in topology.local_ranks], interruption)
    except OSError as error:
        problem = str(error)
    invitations = comm.allgather(None if link is None else link.invitation)
    if link is not None:
        try:
            channel = link.connect(invitations[topology.local_ranks[0]])
        except OSError as error:
            problem = str(error)
    problems = [f"rank {topology.job_ranks[rank]} on {topology.host_of[rank]}: {text}"
                for rank, text in enumerate(comm.allgather(problem)) if text]
    if problems:
        for opened in (channel, link):
            if opened is not None:
                opened.close()
        raise MpistratError(f"Ranks of one host cannot connect to each other. {'; '.join(problems)}")
    assert link is not None and channel is not None
    return link, channel


def _shared_memory(setup: _Setup, data_bytes: int, is_last: bool = True) -> HostMemory | None:
    """Map memory that the ranks of a host share, and return it; None on all ranks if any rank fails. Collective.

    `data_bytes`: The size without HostMemory's counters. `is_last`: False if the caller will try a smaller size next.

    Raises MpistratError: On all ranks, if any rank fails, `is_last` is true and MPISTRAT_CPU_OPERATIONS=shared_memory.
    """
    topology, settings = setup.topology, setup.settings
    nbytes = HostMemory.size_for(topology.local_size, data_bytes)
    is_extended = settings.limit_s and len(topology.hosts) > 1
    limit_s = settings.limit_s + _EXTRA_WAIT_S if is_extended else settings.limit_s
    memory = None
    problems: dict[int, str] = {}
    # The first rank of a host reserves the memory before the other ranks map it, so the limits of that rank decide.
    for is_due in (topology.local_rank == 0, topology.local_rank > 0):
        problem = ""
        if is_due and not problems:
            try:
                memory = HostMemory(setup.link.file().map(nbytes), topology.local_rank, topology.local_ranks, limit_s,
                                    topology, setup.interruption)
            except OSError as error:
                problem = (f"{nbytes / 2**20:.1f} MiB of memory cannot be shared among the ranks of {topology.host}: "
                           f"{error}")
        problems |= {rank: text for rank, text in enumerate(setup.comm.allgather(problem)) if text}
    if not problems:
        return memory
    text = "; ".join(f"rank {topology.job_ranks[rank]}: {text}" for rank, text in problems.items())
    if not is_last:
        logger.log(logging.DEBUG if topology.rank else logging.INFO, "%s. Smaller chunks of memory are tried.", text)
        return None
    if settings.cpu_operations == "shared_memory":
        raise MpistratError(f"MPISTRAT_CPU_OPERATIONS=shared_memory: {text}")
    if topology.rank == 0:
        logger.warning("%s. MPI is used instead, which is slower.", text)
    return None


# -- groups -----------------------------------------------------------------------------------------------------------

_LAST_OPERATIONS = 3  # The number of last operations in a report.


class Group:
    """One rank's objects for a group: backends and engine. The constructor starts the engine.

    Args:
        comm: The communicator of the group; None for a group of one rank.
        interruption: Ends the engine after a loss of ranks. `backends` must have been built with this object.
        tracer: Gets each operation, and exchanges messages with other ranks' tracers. Only for the group of all ranks.
        processes: The known processes of other ranks of this host. The keys are the ranks' numbers in the job.
    """

    def __init__(self, settings: Settings, topology: Topology, backends: Backends, comm: "MPI.Intracomm | None",
                 interruption: Interruption, tracer: Observer | None = None,
                 processes: Mapping[int, Process] = MappingProxyType({})):
        self.topology, self.comm = topology, comm
        self._backends, self.feedback = backends, backends.feedback
        self.data_name = backends.data.name  # The name of the backend that reduces CPU tensors.
        # The value of `joins` when counting began, and the counters by key.
        self._numbers: tuple[int, defaultdict[Hashable, itertools.count]] = 0, defaultdict(itertools.count)
        self._requests: dict[str, tuple[object, Request]] = {}  # By name: the arguments of a request, and the request.
        ring = OperationRing(RECORDED_OPERATIONS if settings.is_recorded else 0, tracer)
        self._device = GpuExecutor(topology, backends.data, settings, ring)
        # Checks gradients for Inf and NaN; None: they are not checked.
        self.finite = FiniteWatch(topology.job_rank) if settings.nan_warning else None
        executor = Executor(backends.data, topology, settings.fusion_bytes, self._device, ring, self.finite)
        controller = Controller(topology, backends.control, executor, settings, backends.agreement,
                                interruption=interruption, where=partial(_where, ring),
                                look=partial(error_text.look, processes))
        # The recorded operations of this group.
        self.traced = Traced(ring, topology.size, backends.data.name, controller.queue.in_flight,
                             backends.data.measured_choices)
        self.engine = Engine(controller)  # Executes the collectives of the group.
        self.engine.start()

    def request_on_gpu(self, name: str, tensors: GpuTensors, make_request: "partial[Request]") -> Request:
        """Return the request for GPU tensors. Calls with equal arguments get a cached request. Any thread may call it.

        `make_request(name, specs, device=...)` makes the request. The specs are dtypes and shapes.
        """
        known = self._requests.get(name)
        kind = make_request.func, make_request.keywords, list(tensors.shapes), tensors.dtypes
        if known is None or known[0] != kind:
            if len(self._requests) >= KEPT_REQUESTS:
                self._requests.clear()
            known = self._requests[name] = kind, make_request(name, specs_of(tensors), device=DEVICE_GPU)
        return known[1]

    def await_gpu(self) -> None:
        """Wait for the GPU: it may still execute collectives whose handles are complete. Local. Raises EngineError."""
        self._device.await_kept()

    @property
    def joins(self) -> int:
        """The number of times that all ranks have completed a join()."""
        return self.engine.controller.joins

    @property
    def executed(self) -> int:
        """The number of operations that this rank has executed."""
        return self.engine.controller.queue.completed

    @property
    def error(self) -> Exception | None:
        """The error that ended the engine; None while it runs, and after a shutdown of all ranks."""
        return self.engine.controller.life.error

    def next_number(self, key: Hashable) -> int:
        """Return the number of earlier calls of this method with the same `key`. Local.

        Ranks of the group that make the same calls in the same order get the same numbers. Counting restarts after a
        join(), because some ranks may have made fewer calls before the join().
        """
        joins = self.engine.controller.joins
        if self._numbers[0] != joins:
            self._numbers = joins, defaultdict(itertools.count)
        return next(self._numbers[1][key])

    def exchange(self, payload: bytes, name: str, marks: Sequence[int] = ()) -> tuple[list[bytes], list[list[int]]]:
        """Return the `payload` of each rank and the `marks` of each rank, in rank order. Collective over the group.

        A first operation exchanges the marks, and hashes of the payloads. If the hashes differ, a second operation
        exchanges the payloads. `marks`: 64-bit integers, of which each rank must pass the same number.
        """
        digest = np.frombuffer(hashlib.blake2b(payload, digest_size=16).digest(), np.int64)
        head = np.array([[len(payload), *digest, *marks]], np.int64)
        heads, = self.engine.run(allgather_request(f"{name}.heads", specs_of([head])), [head]).wait()
        sizes, of_ranks = heads[:, 0].tolist(), heads[:, 3:].tolist()
        if (heads[:, :3] == head[:, :3]).all():
            return [payload] * len(heads), of_ranks
        own = np.frombuffer(payload, np.uint8)
        together, = self.engine.run(allgather_request(f"{name}.payloads", specs_of([own])), [own]).wait()
        return [together[end - size:end].tobytes() for end, size in zip(np.cumsum(sizes), sizes, strict=True)], of_ranks

    def revoke(self) -> list[Any]:
        """Give up all resources after a loss of ranks. Local. Returns the communicators and requests to discard."""
        return [*self._backends.revoke(), *([] if self.comm is None else [self.comm])]

    def free(self) -> None:
        """Free all resources. Collective. Call it when the engine has ended without an error."""
        self._device.close()
        self._backends.close()
        if self.comm is not None:
            self.comm.Free()


def _where(ring: OperationRing) -> str:
    """Return a text for reports on late ranks: where this rank is in the script, and its last collectives.

    It is no method, because the engine would then refer to the Group, and this cycle would keep the memory of both.
    """
    now = time.monotonic_ns()
    last = [f"{each.request.name} ({(now - each.delivered) / 1e9:.1f} s ago)"
            for each in ring.since(0)[-_LAST_OPERATIONS:]]
    return error_text.where() + (f"\nIts last collectives: {', '.join(last)}" if last else "")
