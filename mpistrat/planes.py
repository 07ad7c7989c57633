"""The choice of backends: what moves messages and arrays among the ranks, as the topology and the settings have it.

What a backend needs is imported when it is chosen: mpi4py loads an MPI library, and cupy is often not there.
"""

import contextlib
import logging
import mmap
import os
from dataclasses import dataclass
from typing import Any

from . import mpi_setup
from .collectives.base import Ballot, ControlPlane, DataPlane, Mail
from .collectives.local import ThreadGroup
from .errors import MpistratError
from .gpu.connection import Hosts, Ways
from .mismatch import rank_list
from .settings import Settings
from .topology import Topology
from .tree import edges_among, neighbours_of

logger = logging.getLogger(__name__)

# Ranks that wait for another one of their host do so a little longer than that one waits for other hosts: it can tell
# more of the cause.
_LONGER_S = 1.0


@dataclass(frozen=True)
class Backend:
    """A way to move tensors, and whether it can be used here."""

    name: str
    available: bool
    reason: str = ""


@dataclass(frozen=True)
class Planes:
    """What moves the messages and arrays of one rank.

    Attributes:
        control: Messages.
        data: Arrays.
        ways: What GPU tensors can go by besides NCCL and `data`.
        ballot: How the ranks vote; None if they cannot.
    """

    control: ControlPlane
    data: DataPlane
    ways: Ways
    ballot: Ballot | None = None

    def close(self) -> None:
        """Release what they hold. Collective; the engine has ended."""
        self.ways.close()
        self.data.close()
        if self.ballot is not None:
            self.ballot.close()
        self.control.close()


def backends() -> list[Backend]:
    """The ways to move tensors that are known, and for each whether this process can use it. Loads mpi4py, and cupy."""
    try:
        mpi = mpi_setup.load_mpi()
        mpi_setup.require_thread_level(mpi)
        found = Backend("mpi", True)
    except MpistratError as error:
        found = Backend("mpi", False, str(error))
    return [Backend("local", True, "one rank only"), found, _shared_memory_backend(), _nccl_backend()]


def _shared_memory_backend() -> Backend:
    from .collectives.host_file import HostFile
    try:
        file = HostFile.make()
        try:
            file.take(4096)
        finally:
            file.close()
    except OSError as error:
        return Backend("shared_memory", False, str(error))
    return Backend("shared_memory", True, "among the ranks of a host, of all sizes")


def _nccl_backend() -> Backend:
    try:
        from .gpu.device import Device, gpu_count
    except ImportError as error:
        return Backend("nccl", False, f"cupy cannot be imported: {error} (pip install 'mpistrat[gpu]')")
    if not Device.nccl_version():
        return Backend("nccl", False, "cupy finds no NCCL (pip install 'mpistrat[gpu]')")
    if not gpu_count():
        return Backend("nccl", False, "no GPU is visible")
    return Backend("nccl", True, "tensors on GPUs")


def planes_alone() -> Planes:
    """Those of a rank without others. Local."""
    group = ThreadGroup(1)
    return Planes(group.control(0), group.data(0), Ways(Hosts([0], group.data(0))))


def planes_over(comm: Any, topology: Topology, settings: Settings) -> Planes:
    """Shared memory within a host where all ranks have it, and MPI for the rest. Collective over `comm`.

    The ranks can vote if those of each host share memory, unless the setting for that is off.
    """
    from .collectives.freight import Freight
    from .collectives.hierarchical import HierarchicalData, counterparts
    from .collectives.host_memory import HostMemory
    from .collectives.hosts_ballot import HostsBallot
    from .collectives.hosts_vote import hosts_vote
    from .collectives.mpi import MpiControl, MpiData
    from .collectives.peer_wait import PeerWait
    from .collectives.shared_ballot import SharedBallot
    from .collectives.shared_mail import SharedMail, mail_bytes
    from .collectives.shared_memory import SharedMemoryData
    rank, here = topology.rank, topology.local_ranks
    elsewhere = [other for other in range(topology.size) if other not in here]
    link, host_mail = _linked(comm, topology)
    wait = PeerWait(topology, range(topology.size), settings.limit_s)
    mail: Mail = host_mail
    ballot: Ballot | None = None
    data: DataPlane = MpiData(comm.Dup(), wait)
    if settings.cpu_operations != "mpi" and max(topology.local_sizes) > 1:
        one_host = not elsewhere
        plane = SharedMemoryData if one_host else HierarchicalData
        plane_bytes, edges = plane.memory_bytes(len(here), plane.chunk_bytes), edges_among(here)
        has_freight = settings.fast_path and not one_host
        freight_at, each = plane_bytes + mail_bytes(edges), Freight.largest(topology.local_sizes) if has_freight else 0
        memory = _shared_memory(comm, topology, settings, link, freight_at + Freight.memory_bytes(len(here), each))
        if memory is not None:
            mail = shared_mail = SharedMail(memory, plane_bytes, edges, host_mail)
            if one_host:
                ballot = SharedBallot(memory, shared_mail.rouse) if settings.fast_path else None
                data = SharedMemoryData(memory, plane.chunk_bytes, data)
            else:
                freight = Freight(memory.data[freight_at:], memory.index, len(here), each) if each else None
                if settings.fast_path:
                    ballot = HostsBallot(memory, shared_mail.rouse, hosts_vote(comm, topology, freight), elsewhere)
                across = PeerWait(topology, topology.cross_ranks, settings.limit_s)
                data = HierarchicalData(memory, plane.chunk_bytes, data, counterparts(comm, topology),
                                        min(topology.local_sizes), across, freight)
    elif max(topology.local_sizes) == 1 and settings.fast_path:
        alone = HostMemory(mmap.mmap(-1, HostMemory.size_for(1, 0)), 0, here)
        ballot = HostsBallot(alone, host_mail.wake_other, hosts_vote(comm, topology, None), elsewhere)
    link.close()
    if ballot is not None:
        mail.watch(ballot.has_news)
    leads = ballot is not None and rank == here[0] and bool(elsewhere)
    control = MpiControl(comm.Dup(), mail, here, neighbours_of(rank, topology.size), leads, wait)
    return Planes(control, data, _ways(comm, topology, settings, wait), ballot)


def _linked(comm: Any, topology: Topology) -> tuple[Any, Any]:
    """The HostLink of this rank's host, to be closed, and this rank's HostMail. Collective.

    Raises:
        MpistratError: On all ranks; the ranks of some host cannot be connected.
    """
    from .collectives.host_link import HostLink
    link, mail, problem = None, None, ""
    try:
        link = HostLink(topology.rank, topology.local_ranks)
    except OSError as error:
        problem = str(error)
    invitations = comm.allgather(None if link is None else link.invitation)
    if link is not None:
        try:
            mail = link.connect(invitations[topology.local_ranks[0]])
        except OSError as error:
            problem = str(error)
    problems = [f"rank {rank} on {topology.host_of[rank]}: {text}"
                for rank, text in enumerate(comm.allgather(problem)) if text]
    if problems:
        for opened in (mail, link):
            if opened is not None:
                opened.close()
        raise MpistratError(f"The ranks of a host cannot be connected. {'; '.join(problems)}")
    return link, mail


def _ways(comm: Any, topology: Topology, settings: Settings, wait: Any) -> Ways:
    """What GPU tensors can go by besides NCCL and what CPU tensors go by. Collective."""
    hosts = _hosts(comm, topology, settings)
    if settings.gpu_operations not in ("auto", "mpi"):
        return Ways(hosts)
    from .collectives.device_mpi import DeviceMpi
    told = comm.allgather(mpi_setup.takes_gpu_memory(mpi_setup.load_mpi(), os.environ))
    silent = [rank for rank, text in enumerate(told) if not text]
    if silent:
        return Ways(hosts, why_not_mpi=f"the MPI library of ranks {rank_list(silent)} does not say that it takes "
                                       "memory of GPUs")
    return Ways(hosts, DeviceMpi(comm.Dup(), wait), told[0])


def _hosts(comm: Any, topology: Topology, settings: Settings) -> Hosts | None:
    """What reduces GPU tensors between hosts where that is wanted, and hosts have as many ranks each. Collective."""
    if settings.gpu_operations != "hierarchical" or not topology.is_homogeneous:
        return None
    from .collectives.hierarchical import counterparts
    from .collectives.mpi import MpiData
    from .collectives.peer_wait import PeerWait
    wait = PeerWait(topology, topology.cross_ranks, settings.limit_s)
    return Hosts(topology.local_ranks, MpiData(counterparts(comm, topology), wait))


def _shared_memory(comm: Any, topology: Topology, settings: Settings, link: Any, data_bytes: int) -> Any:
    """HostMemory, or None on all ranks if any rank cannot have it. Collective."""
    from .collectives.host_memory import HostMemory
    nbytes = HostMemory.size_for(topology.local_size, data_bytes)
    limit_s = settings.limit_s + _LONGER_S if settings.limit_s and len(topology.hosts) > 1 else settings.limit_s
    memory = None
    problems: dict[int, str] = {}
    # The first rank of a host reserves the memory before the others map it, so that its limits decide.
    for is_due in (topology.local_rank == 0, topology.local_rank > 0):
        problem = ""
        if is_due and not problems:
            try:
                with contextlib.closing(link.share()) as file:
                    memory = HostMemory(file.take(nbytes), topology.local_rank, topology.local_ranks, limit_s, topology)
            except OSError as error:
                problem = (f"{nbytes / 2**20:.1f} MiB of memory cannot be shared among the ranks of {topology.host}: "
                           f"{error}")
        problems |= {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if not problems:
        return memory
    text = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
    if settings.cpu_operations == "shared_memory":
        raise MpistratError(f"MPISTRAT_CPU_OPERATIONS=shared_memory: {text}")
    if topology.rank == 0:
        logger.warning("%s. MPI is used instead, which is slower.", text)
    return None
