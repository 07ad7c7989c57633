"""The choice of backends: what moves messages and arrays among the ranks, as the topology and the settings have it.

What a backend needs is imported when it is chosen: mpi4py loads an MPI library, and cupy is often not there.
"""

import contextlib
import logging
import mmap
from dataclasses import dataclass
from typing import Any

from ..core.errors import MpistratError
from ..core.interfaces import AgreementRound, ControlPlane, DataPlane, LocalChannel
from ..core.settings import Settings
from ..core.topology import Topology
from ..negotiation.tree import edges_among, neighbours_of
from ..transport.local import ThreadGroup
from ..transport.shm.segment import HostMemory, Regions

logger = logging.getLogger(__name__)

# Ranks that wait for another one of their host do so a little longer than that one waits for other hosts: it can tell
# more of the cause.
_LONGER_S = 1.0


@dataclass(frozen=True)
class Backends:
    """What moves the messages and arrays of one rank.

    Attributes:
        control: Messages.
        data: Arrays.
        agreement: How the ranks vote; None if they cannot.
    """

    control: ControlPlane
    data: DataPlane
    agreement: AgreementRound | None = None

    def close(self) -> None:
        """Release what they hold. Collective; the engine has ended."""
        self.data.close()
        if self.agreement is not None:
            self.agreement.close()
        self.control.close()


def backends_alone() -> Backends:
    """Those of a rank without others. Local."""
    group = ThreadGroup(1)
    return Backends(group.control(0), group.data(0))


@dataclass(frozen=True)
class _Job:
    """What the builders of planes have in common.

    Attributes:
        comm: All ranks.
        link: Passes memory among the ranks of this host.
        channel: Messages among the ranks of this host, over sockets.
        mpi: Collectives over MPI, which serve where shared memory does not.
    """

    comm: Any
    topology: Topology
    settings: Settings
    link: Any
    channel: Any
    mpi: DataPlane

    @property
    def elsewhere(self) -> list[int]:
        """The ranks of other hosts."""
        return [rank for rank in range(self.topology.size) if rank not in self.topology.local_ranks]


# Arrays, messages within the host, and votes if the ranks can vote.
_Parts = tuple[DataPlane, LocalChannel, AgreementRound | None]


def backends_over(comm: Any, topology: Topology, settings: Settings) -> Backends:
    """Shared memory within a host where all ranks have it, and MPI for the rest. Collective over `comm`.

    The ranks can vote if those of each host share memory, unless the setting for that is off.
    """
    from ..transport.mpi.control import MpiControl
    from ..transport.mpi.data import MpiData
    from ..transport.mpi.peer_wait import PeerWait
    rank, here = topology.rank, topology.local_ranks
    link, channel = _linked(comm, topology)
    wait = PeerWait(topology, range(topology.size), settings.limit_s)
    job = _Job(comm, topology, settings, link, channel, MpiData(comm.Dup(), wait))
    parts: _Parts | None = None
    if settings.cpu_operations != "mpi" and max(topology.local_sizes) > 1:
        parts = _planes_of_one_host(job) if not job.elsewhere else _planes_of_hosts(job)
    elif max(topology.local_sizes) == 1 and settings.fast_path:
        parts = _planes_of_lone_ranks(job)
    data, channel, agreement = parts or (job.mpi, channel, None)
    link.close()
    if agreement is not None:
        channel.watch(agreement.has_news)
    leads = agreement is not None and rank == here[0] and bool(job.elsewhere)
    control = MpiControl(comm.Dup(), channel, here, neighbours_of(rank, topology.size), leads, wait)
    return Backends(control, data, agreement)


def _planes_of_one_host(job: _Job) -> _Parts | None:
    """All ranks share memory; None if they cannot. Collective."""
    from ..transport.shm.agreement import SharedMemoryAgreement
    from ..transport.shm.ring import ShmRing, ring_bytes
    from ..transport.shm.two_shot import SharedMemoryData
    here, chunk = job.topology.local_ranks, SharedMemoryData.chunk_bytes
    edges = edges_among(here)
    regions = Regions(plane=SharedMemoryData.memory_bytes(len(here), chunk), channel=ring_bytes(edges))
    memory = _shared_memory(job, regions.nbytes)
    if memory is None:
        return None
    channel = ShmRing(memory, regions.start_of["channel"], edges, job.channel)
    agreement = SharedMemoryAgreement(memory, channel.wake_rank) if job.settings.fast_path else None
    return SharedMemoryData(memory, chunk, job.mpi), channel, agreement


def _planes_of_hosts(job: _Job) -> _Parts | None:
    """The ranks of each host share memory, and MPI connects the hosts; None if some ranks cannot. Collective."""
    from ..transport.hierarchical.agreement import HierarchicalAgreement
    from ..transport.hierarchical.allreduce import HierarchicalData, cross_comm
    from ..transport.hierarchical.leader_exchange import leader_exchange
    from ..transport.hierarchical.piggyback import Piggyback
    from ..transport.mpi.peer_wait import PeerWait
    from ..transport.shm.ring import ShmRing, ring_bytes
    topology, settings, chunk = job.topology, job.settings, HierarchicalData.chunk_bytes
    count, edges = topology.local_size, edges_among(topology.local_ranks)
    each = Piggyback.largest(topology.local_sizes) if settings.fast_path else 0
    regions = Regions(plane=HierarchicalData.memory_bytes(count, chunk), channel=ring_bytes(edges),
                      piggyback=Piggyback.memory_bytes(count, each))
    memory = _shared_memory(job, regions.nbytes)
    if memory is None:
        return None
    channel, agreement = ShmRing(memory, regions.start_of["channel"], edges, job.channel), None
    piggyback = Piggyback(memory.data[regions.start_of["piggyback"]:], memory.index, count, each) if each else None
    if settings.fast_path:
        agreement = HierarchicalAgreement(memory, channel.wake_rank, leader_exchange(job.comm, topology, piggyback),
                                          job.elsewhere)
    across = PeerWait(topology, topology.cross_ranks, settings.limit_s)
    data = HierarchicalData(memory, chunk, job.mpi, cross_comm(job.comm, topology), min(topology.local_sizes),
                            across, piggyback)
    return data, channel, agreement


def _planes_of_lone_ranks(job: _Job) -> _Parts:
    """Each rank has a host of its own: MPI connects them, and they vote. Collective."""
    from ..transport.hierarchical.agreement import HierarchicalAgreement
    from ..transport.hierarchical.leader_exchange import leader_exchange
    alone = HostMemory(mmap.mmap(-1, HostMemory.size_for(1, 0)), 0, job.topology.local_ranks)
    agreement = HierarchicalAgreement(alone, job.channel.wake_rank, leader_exchange(job.comm, job.topology, None),
                                      job.elsewhere)
    return job.mpi, job.channel, agreement


def _linked(comm: Any, topology: Topology) -> tuple[Any, Any]:
    """The HostLink of this rank's host, to be closed, and this rank's UnixSocketChannel. Collective.

    Raises:
        MpistratError: On all ranks; the ranks of some host cannot be connected.
    """
    from ..transport.host_link import HostLink
    link, channel, problem = None, None, ""
    try:
        link = HostLink(topology.rank, topology.local_ranks)
    except OSError as error:
        problem = str(error)
    invitations = comm.allgather(None if link is None else link.invitation)
    if link is not None:
        try:
            channel = link.connect(invitations[topology.local_ranks[0]])
        except OSError as error:
            problem = str(error)
    problems = [f"rank {rank} on {topology.host_of[rank]}: {text}"
                for rank, text in enumerate(comm.allgather(problem)) if text]
    if problems:
        for opened in (channel, link):
            if opened is not None:
                opened.close()
        raise MpistratError(f"The ranks of a host cannot be connected. {'; '.join(problems)}")
    return link, channel


def _shared_memory(job: _Job, data_bytes: int) -> Any:
    """HostMemory, or None on all ranks if any rank cannot have it. Collective."""
    topology, settings = job.topology, job.settings
    nbytes = HostMemory.size_for(topology.local_size, data_bytes)
    limit_s = settings.limit_s + _LONGER_S if settings.limit_s and len(topology.hosts) > 1 else settings.limit_s
    memory = None
    problems: dict[int, str] = {}
    # The first rank of a host reserves the memory before the others map it, so that its limits decide.
    for is_due in (topology.local_rank == 0, topology.local_rank > 0):
        problem = ""
        if is_due and not problems:
            try:
                with contextlib.closing(job.link.share()) as file:
                    memory = HostMemory(file.take(nbytes), topology.local_rank, topology.local_ranks, limit_s, topology)
            except OSError as error:
                problem = (f"{nbytes / 2**20:.1f} MiB of memory cannot be shared among the ranks of {topology.host}: "
                           f"{error}")
        problems |= {rank: text for rank, text in enumerate(job.comm.allgather(problem)) if text}
    if not problems:
        return memory
    text = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
    if settings.cpu_operations == "shared_memory":
        raise MpistratError(f"MPISTRAT_CPU_OPERATIONS=shared_memory: {text}")
    if topology.rank == 0:
        logger.warning("%s. MPI is used instead, which is slower.", text)
    return None
