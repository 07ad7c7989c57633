"""The Runtime: init wires settings, topology, backend and engine together; shutdown takes them apart in reverse."""

import atexit
import logging
import mmap
import os
import platform
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from . import autotune, introduction, mpi_setup
from .collectives.base import Ballot, ControlPlane, DataPlane, Mail
from .collectives.local import ThreadGroup
from .engine import Engine
from .errors import InvalidRequestError, MpistratError, NotInitializedError, SettingsError
from .gpu.connection import NO_WAYS, Hosts, Ways
from .launch_environment import launched_size
from .mismatch import rank_list
from .settings import Settings, differing, horovod_names
from .topology import Topology, unique_hosts
from .tree import edges_among, neighbours_of

logger = logging.getLogger(__name__)

NOT_INITIALIZED = "mpistrat has not been initialized; use hvd.init()."


@dataclass(frozen=True)
class Backend:
    """A way to move tensors, and whether it can be used here."""

    name: str
    available: bool
    reason: str = ""


class Runtime:
    """Everything that lives between init() and shutdown()."""

    def __init__(self, settings: Settings, topology: Topology, control: ControlPlane, data: DataPlane, comm: Any,
                 ways: Ways = NO_WAYS, ballot: Ballot | None = None):
        self.settings, self.topology, self.comm = settings, topology, comm
        self._control, self._data, self._ways, self._ballot = control, data, ways, ballot
        self.engine = Engine(topology.rank, topology.size, control, data, settings,
                             tuned=self._keep_log if settings.autotune else None, gpu_ways=ways, ballot=ballot)
        if settings.autotune and settings.autotune_log:
            self._use_log()
        self.engine.start()

    def _use_log(self) -> None:
        """Let the engine reduce as an earlier run's autotune has chosen, if there is a log of that. Collective."""
        choice, path = None, self.settings.autotune_log
        if self.topology.rank == 0 and os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    choice = autotune.read_report(file.read(), self.engine.knobs())
            except (OSError, ValueError) as error:
                logger.warning("MPISTRAT_AUTOTUNE_LOG=%s is not used, and a new search begins: %s", path, error)
        choice = choice if self.comm is None else self.comm.bcast(choice)
        if choice is not None:
            self.engine.choose(choice)

    def _keep_log(self, tuner: autotune.Autotuner) -> None:
        logger.info("autotune chose %s, %.2f times as fast as %s", tuner.best, tuner.gain, tuner.first)
        if self.settings.autotune_log:
            try:
                with open(self.settings.autotune_log, "w", encoding="utf-8") as file:
                    file.write(tuner.report())
            except OSError as error:
                logger.warning("MPISTRAT_AUTOTUNE_LOG: %s", error)

    @property
    def data_name(self) -> str:
        """The name of what reduces CPU tensors."""
        return self._data.in_use

    def close(self) -> None:
        """Wait until all ranks have called this, stop the engine and free what it used. Collective."""
        self.engine.end(self._report_waiting)
        if self.engine.error is not None:
            return  # The other ranks are in no state to free communicators together with this one.
        self.engine.close()
        self._ways.close()
        self._data.close()
        if self._ballot is not None:
            self._ballot.close()
        self._control.close()
        if self.comm is not None:
            self.comm.Free()

    def abandon(self, reason: str) -> None:
        """End this rank's part without the other ranks, some of which have died; `reason` says which. Local."""
        if self.comm is not None:
            mpi_setup.finalize_without_barrier(mpi_setup.load_mpi())
        self.engine.abandon(reason)

    def _report_waiting(self, waited_s: float) -> None:
        logger.info("rank %d has shut down and has waited %.0f s for the other ranks to do so", self.topology.rank,
                    waited_s)


_runtime: Runtime | None = None
_lock = threading.Lock()


def current() -> Runtime:
    """The Runtime that init() made. Raises NotInitializedError before init() and after shutdown()."""
    runtime = _runtime
    if runtime is None:
        raise NotInitializedError(NOT_INITIALIZED)
    return runtime


def is_initialized() -> bool:
    """Whether init() has been called, and shutdown() has not since. Not collective."""
    return _runtime is not None


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find the other ranks and start the engine. Collective; a repeated call does nothing.

    Without a launcher in the environment this is one rank, and no MPI library is loaded.

    Args:
        comm: A list of ranks of MPI's world, or an mpi4py communicator; the default is all ranks.
        process_sets: In Horovod's signature; there is only the set of all ranks here, so None or an empty list.

    Raises:
        InvalidRequestError: Process sets were given.
        SettingsError: An MPISTRAT_ variable is wrong on some rank, or not the same on all; on every rank.
        MissingDependencyError: mpi4py cannot load an MPI library.
        MpistratError: MPI sees fewer ranks than were started, or lacks the thread level.
    """
    global _runtime
    if process_sets:
        raise InvalidRequestError("process sets other than the global one are not available. For a job on fewer ranks, "
                                  f"use init(comm=[...]). Received: process_sets={process_sets!r}")
    with _lock:
        if _runtime is not None:
            return
        began = time.monotonic()
        size, launcher = launched_size(os.environ)
        mpi = sys.modules.get("mpi4py.MPI")
        if comm is None and size == 1 and (mpi is None or mpi.COMM_WORLD.Get_size() == 1):
            runtime = _init_alone()
        else:
            runtime = _init_mpi(comm, size, launcher)
        _runtime = runtime
        atexit.register(shutdown)
    topology = runtime.topology
    if topology.rank == 0:
        logger.info("%d ranks on %d hosts, ready in %.2f s", topology.size, len(topology.hosts),
                    time.monotonic() - began)


def shutdown() -> None:
    """End what init() began; init() may be called again. Collective: returns when all ranks have called it.

    It is called at the end of the script by itself. Operations that other ranks still wait for then fail there with
    ShutdownError.
    """
    global _runtime
    with _lock:
        runtime, _runtime = _runtime, None
        if runtime is not None:
            atexit.unregister(shutdown)
            runtime.close()


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
    from .collectives.host_file import HandOver
    try:
        file = HandOver(0, [0], "").share()
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


def _init_alone() -> Runtime:
    settings = Settings.from_env(os.environ)
    _configure(settings, chief=True)
    group = ThreadGroup(1)
    return Runtime(settings, Topology(0, (platform.node(),)), group.control(0), group.data(0), None,
                   Ways(Hosts([0], group.data(0))))


def _init_mpi(comm: Any, launched: int, launcher: str) -> Runtime:
    mpi = mpi_setup.load_mpi()
    # From here on, an error on this rank alone would leave the others waiting.
    mpi_setup.end_job_on_exception(mpi, mpi.COMM_WORLD.Get_rank(), platform.node())
    base = mpi_setup.communicator(mpi, comm, launched, launcher)
    mpi_setup.wait_for_all(base)
    own = base.Dup()
    rank = own.Get_rank()
    everybody = introduction.introduce(mpi, own)
    problems = {r: other.problem for r, other in enumerate(everybody) if other.problem}
    if problems:
        raise SettingsError("; ".join(f"rank {r}: {text}" for r, text in problems.items()))
    settings = [other.settings for other in everybody if other.settings is not None]
    different = differing(settings)
    if different:
        raise SettingsError(" ".join(different))
    topology = Topology(rank, unique_hosts([o.host for o in everybody], [o.memory_group for o in everybody]))
    _configure(settings[rank], chief=rank == 0)
    if rank == 0:
        for sentence in introduction.differences(everybody):
            logger.warning("%s", sentence)
    token = own.bcast(os.urandom(8).hex() if rank == 0 else None)
    control, data, ballot = _planes(own, topology, settings[rank], token)
    return Runtime(settings[rank], topology, control, data, own, _ways(mpi, own, topology, settings[rank]),
                   ballot)


def _planes(comm: Any, topology: Topology, settings: Settings, token: str,
            ) -> tuple[ControlPlane, DataPlane, Ballot | None]:
    """What moves messages and arrays: shared memory within a host where all ranks have it, else MPI. Collective.

    The ranks can vote if those of each host share memory.
    """
    from .collectives.freight import Freight
    from .collectives.hierarchical import HierarchicalData, counterparts
    from .collectives.host_file import HandOver
    from .collectives.host_mail import HostMail
    from .collectives.host_memory import HostMemory
    from .collectives.hosts_ballot import HostsBallot
    from .collectives.hosts_vote import hosts_vote
    from .collectives.mpi import MpiControl, MpiData
    from .collectives.shared_ballot import SharedBallot
    from .collectives.shared_mail import SharedMail, mail_bytes
    from .collectives.shared_memory import SharedMemoryData
    rank, here = topology.rank, topology.local_ranks
    elsewhere = [other for other in range(topology.size) if other not in here]
    host_mail = HostMail(rank, here, token)
    mail: Mail = host_mail
    ballot: Ballot | None = None
    data: DataPlane = MpiData(comm.Dup())
    hand_over = HandOver(rank, here, token)
    mpi_setup.wait_for_all(comm)  # Every mailbox has its address before anybody writes to it.
    if settings.cpu_operations != "mpi" and max(topology.local_sizes) > 1:
        one_host = not elsewhere
        plane = SharedMemoryData if one_host else HierarchicalData
        plane_bytes, edges = plane.memory_bytes(len(here), plane.chunk_bytes), edges_among(here)
        freight_at, each = plane_bytes + mail_bytes(edges), 0 if one_host else Freight.largest(topology.local_sizes)
        shared = _shared_memory(comm, topology, settings, hand_over, freight_at + Freight.memory_bytes(len(here), each))
        if shared is not None:
            memory, results = shared
            mail = shared_mail = SharedMail(memory, plane_bytes, edges, host_mail)
            if one_host:
                ballot = SharedBallot(memory, shared_mail.rouse)
                data = SharedMemoryData(memory, plane.chunk_bytes, data, results)
            else:
                freight = Freight(memory.data[freight_at:], memory.index, len(here), each) if each else None
                ballot = HostsBallot(memory, shared_mail.rouse, hosts_vote(comm, topology, freight), elsewhere)
                data = HierarchicalData(memory, plane.chunk_bytes, data, results, counterparts(comm, topology),
                                        min(topology.local_sizes), settings.stall_abort_s, freight)
    elif max(topology.local_sizes) == 1:
        alone = HostMemory(mmap.mmap(-1, HostMemory.size_for(1, 0)), 0, here)
        ballot = HostsBallot(alone, host_mail.wake_other, hosts_vote(comm, topology, None), elsewhere)
    if ballot is not None:
        mail.watch(ballot.has_news)
    leads = ballot is not None and rank == here[0] and bool(elsewhere)
    control = MpiControl(comm.Dup(), mail, here, neighbours_of(rank, topology.size), polls=leads)
    return control, data, ballot


def _ways(mpi: Any, comm: Any, topology: Topology, settings: Settings) -> Ways:
    """What GPU tensors can go by besides NCCL and `_planes`. Collective."""
    hosts = _hosts(comm, topology, settings)
    if settings.gpu_operations not in ("auto", "mpi"):
        return Ways(hosts)
    from .collectives.device_mpi import DeviceMpi
    told = comm.allgather(mpi_setup.takes_gpu_memory(mpi, os.environ))
    silent = [rank for rank, text in enumerate(told) if not text]
    if silent:
        return Ways(hosts, why_not_mpi=f"the MPI library of ranks {rank_list(silent)} does not say that it takes "
                                       "memory of GPUs")
    return Ways(hosts, DeviceMpi(comm.Dup()), told[0])


def _hosts(comm: Any, topology: Topology, settings: Settings) -> Hosts | None:
    """What reduces GPU tensors between hosts where that is wanted, and hosts have as many ranks each. Collective."""
    if settings.gpu_operations != "hierarchical" or not topology.is_homogeneous:
        return None
    from .collectives.hierarchical import counterparts
    from .collectives.mpi import MpiData
    return Hosts(topology.local_ranks, MpiData(counterparts(comm, topology)))


def _shared_memory(comm: Any, topology: Topology, settings: Settings, hand_over: Any, data_bytes: int) -> Any:
    """HostMemory and SharedResults, or None on all ranks if any rank cannot have them. Collective."""
    from .collectives.host_memory import HostMemory
    from .collectives.shared_results import SharedResults
    nbytes = HostMemory.size_for(topology.local_size, data_bytes)
    shared, file, problem = None, None, ""
    try:
        file = hand_over.share()
        memory = HostMemory(file.take(nbytes), topology.local_rank, topology.local_ranks, settings.stall_abort_s)
        shared = memory, SharedResults(memory, file)
    except OSError as error:
        problem = f"{nbytes / 2**20:.1f} MiB of memory cannot be shared among the ranks of {topology.host}: {error}"
    problems = {rank: text for rank, text in enumerate(comm.allgather(problem)) if text}
    if not problems:
        return shared
    if file is not None:
        file.close()
    text = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items())
    if settings.cpu_operations == "shared_memory":
        raise MpistratError(f"MPISTRAT_CPU_OPERATIONS=shared_memory: {text}")
    if topology.rank == 0:
        logger.warning("%s. MPI is used instead, which is slower.", text)
    return None


def _configure(settings: Settings, chief: bool) -> None:
    """Set the log level and, unless the application has set up logging, where the messages go."""
    package = logging.getLogger("mpistrat")
    package.setLevel(settings.logging_level)
    if not logging.getLogger().handlers and not package.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[mpistrat] %(levelname)s %(message)s"))
        package.addHandler(handler)
    if chief:
        for sentence in horovod_names(os.environ):
            logger.warning("%s", sentence)
