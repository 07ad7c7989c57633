"""Chooses the backends that move messages and CPU arrays among the ranks, from the topology and the settings.

`backends_over` tries shared memory within each host first, and uses MPI otherwise. Modules that load an MPI library are
imported only when they are used. init() calls this module, in the thread that has called init().
"""

import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..core.error_feedback import ErrorFeedback
from ..core.errors import MpistratError
from ..core.interfaces import AgreementRound, ControlPlane, DataPlane
from ..core.interruption import Interruption
from ..core.settings import Settings
from ..core.topology import Topology
from ..negotiation.subtree import Node, edges_among
from ..transport.host_link import HostLink
from ..transport.local import LocalAgreement, LocalControl, LocalData
from ..transport.shm.ring import LocalChannel, ShmRing, ring_bytes
from ..transport.shm.segment import HostMemory, SharedMemoryAgreement
from ..transport.unix_socket import UnixSocketChannel

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..transport.mpi.mpi_data import MpiData

logger = logging.getLogger(__name__)

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
        """Give up all resources after a loss of ranks. Local; after the engine has ended. See DataPlane.revoke."""
        return [*self.data.revoke(), *(self.agreement.revoke() if self.agreement is not None else []),
                *self.control.revoke()]

    def close(self) -> None:
        """Release all resources. Collective; after the engine has ended."""
        self.data.close()
        if self.agreement is not None:
            self.agreement.close()
        self.control.close()


def backends_alone(settings: Settings) -> Backends:
    """Return the backends for a job of one rank. Local; loads no MPI library."""
    return Backends(LocalControl(), LocalData(), LocalAgreement() if settings.uses("fast_path") else None)


@dataclass(frozen=True)
class _Setup:
    """The arguments that all functions that build backends share."""

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


def backends_over(comm: "MPI.Intracomm", topology: Topology, settings: Settings,
                  interruption: Interruption) -> Backends:
    """Build the backends for a job of several ranks. `interruption` ends their waits. Collective over `comm`.

    Shared memory is used within hosts if all ranks can map it. The fast path is used if the ranks of each host share
    memory, or if each host has one rank, unless MPISTRAT_DISABLE=fast_path.
    """
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
    """Build the backends for ranks of one host, over shared memory. None if the ranks cannot share it. Collective."""
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
    """Use shared memory within each host and MPI between hosts. None if some ranks cannot share memory. Collective.

    With MPISTRAT_CPU_OPERATIONS=mpi, called only if each host has one rank: the fast path is used, arrays go over MPI.
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
    """Connect the ranks of each host. Collective. The caller closes the HostLink.

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
    """Allocate and map memory that the ranks of a host share. None on all ranks if any rank fails. Collective.

    Args:
        data_bytes: The number of bytes, without the bytes of the counters.
        is_last: Whether the caller will not try again with less memory.

    Raises:
        MpistratError: On all ranks, if any rank fails, `is_last` is true and MPISTRAT_CPU_OPERATIONS=shared_memory.
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
        logger.log(logging.DEBUG if topology.rank else logging.INFO, "%s. Smaller chunks are tried.", text)
        return None
    if settings.cpu_operations == "shared_memory":
        raise MpistratError(f"MPISTRAT_CPU_OPERATIONS=shared_memory: {text}")
    if topology.rank == 0:
        logger.warning("%s. MPI is used instead, which is slower.", text)
    return None
