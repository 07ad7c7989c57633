"""init() and shutdown(): settings, topology, backends and engine are wired together, and closed in reverse order.

Between init() and shutdown() a `Job` holds these parts, and `current()` returns the Job to other modules. Any thread
may call the functions of this module; a lock makes init() and shutdown() exclude each other.
"""

import atexit
import dataclasses
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from ..core import annotations, forked
from ..core.errors import InvalidRequestError, NotInitializedError, SettingsError
from ..core.handle import require_no_driver
from ..core.settings import Settings, differing, horovod_warning
from ..core.topology import Topology, unique_hosts
from ..elastic import membership
from ..gpu.assignment import set_cuda_variables
from ..process import abort, error_text, exit_code, report
from ..process.launch_env import launched_rank, launched_size
from ..process.launcher_watch import LauncherWatch, launcher_here, require_own_place
from ..process.procfs import Process
from ..trace import clocks
from ..trace.tracer import Tracer
from ..transport.mpi import mpi_library
from . import handshake, own_cores
from .backends import Backends, backends_alone, backends_over
from .group import Group
from .interrupt import interrupt
from .job import Job, log_step
from .lost_ranks import Losses
from .process_sets import NOT_INITIALIZED, ProcessSet, global_process_set

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_TELL_S = 0.5  # The longest time that a rank that fails takes to report its last operations.

_runtime: Job | None = None
_watch: LauncherWatch | None = None
_lock = threading.RLock()  # A signal handler may call shutdown() while this thread waits in shutdown().


def _disable_after_fork() -> None:
    """Make collectives raise an error. rank(), size() etc. still work. Called in a forked process."""
    global _lock
    _lock = threading.RLock()  # A thread of the parent may have held the old lock, and does not exist here.
    if _runtime is not None:
        _runtime.disable_after_fork(forked.error())


os.register_at_fork(after_in_child=_disable_after_fork)


def current() -> Job:
    """Return the Job that init() made. Local. Raises NotInitializedError: Before init() and after shutdown()."""
    runtime = _runtime
    if runtime is None:
        raise NotInitializedError(NOT_INITIALIZED)
    return runtime


def group_of(operation: str, process_set: int) -> Group:
    """Return the group of the process set with this id. Local.

    Raises:
        NotInitializedError: Before init() and after shutdown().
        InvalidRequestError: The process set has been removed. The text has `operation`.
    """
    group = (_runtime or current()).registry.groups.get(process_set)
    if group is None:
        raise InvalidRequestError(f"{operation}: process set {process_set} does not exist or has not been registered.")
    return group


def is_initialized() -> bool:
    """Return whether init() has been called, and shutdown() has not been called after it. Local."""
    return _runtime is not None


def init(comm: "MPI.Comm | Iterable[int] | None" = None,
         process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other ranks and start the engine. Collective; a repeated call only registers process sets.

    Without a launcher in the environment the job has one rank, and no MPI library is loaded. If mpi4py does not
    initialise MPI (mpi4py.rc.initialize = False), init() does, with THREAD_MULTIPLE. MPI is finalised at Python's exit.

    Args:
        comm: A list of ranks of MPI_COMM_WORLD, or an mpi4py communicator. Default: all ranks.
        process_sets: Process sets to register, the same on all ranks. "dynamic" is accepted for compatibility with
            Horovod; sets may always be added later.

    Raises:
        InvalidRequestError: On all ranks, if the process sets cannot be registered; see add_process_set. The job is
            initialised nevertheless.
        NotInitializedError: This process is no rank: it was forked from a rank, or has a rank's environment variables.
        SettingsError: On every rank, if an MPISTRAT_ variable is invalid on any rank, or differs among the ranks.
        MissingDependencyError: mpi4py cannot load an MPI library.
        MpistratError: MPI sees fewer ranks than were started, or does not support the thread level.
    """
    forked.require_rank()
    require_own_place(os.environ)
    runtime = _connect(comm)
    if not process_sets or process_sets == "dynamic":
        return
    if isinstance(process_sets, str):
        raise InvalidRequestError('process_sets must be a list of ProcessSet, or "dynamic". '
                                  f"Received: {process_sets!r}")
    runtime.registry.add([each for each in process_sets if getattr(each, "process_set_id", None) is None])


def _connect(comm: "MPI.Comm | Iterable[int] | None") -> Job:
    """Return the Job. If there is none, connect to the other ranks first, which is collective."""
    global _runtime
    with _lock:
        if _runtime is not None:
            return _runtime
        began = time.monotonic()
        size, launcher = launched_size(os.environ)
        if size > 1:
            report.tell(launched_rank(os.environ), report.IN_INIT, os.environ)
        _start_watch()  # Before MPI is initialised, which waits for the other ranks without a limit.
        try:
            membership.join(os.environ)
            if find_spec("nvtx") is not None:
                annotations.add(import_module("nvtx").annotate)
            if mpi_library.is_left_to_init():
                mpi_library.load_mpi()
            mpi = sys.modules.get("mpi4py.MPI")
            if comm is None and size == 1 and (mpi is None or mpi.COMM_WORLD.Get_size() == 1):
                runtime = _init_alone()
            else:
                runtime = _init_mpi(comm, size, launcher)
        except BaseException:
            _stop_watch()
            raise
        forked.claim(os.environ)
        _runtime = runtime
        abort.hand_on(launched_rank(os.environ), os.environ, lambda: interrupt(lambda: current().world.engine))
        if (member := membership.current()) is not None:
            member.connected()
        global_process_set.mpi_comm = cast("MPI.Comm", comm) if hasattr(comm, "Get_group") else None
        atexit.register(_shut_down_at_exit)
    topology = runtime.topology
    log_step(topology.rank, "%s; local rank %d of %d on %s; %d ranks on %d hosts (%s); ready in %.2f s",
             "worker" if topology.rank else "chief", topology.local_rank, topology.local_size, topology.host,
             topology.size, len(topology.hosts), ", ".join(topology.hosts), time.monotonic() - began)
    return runtime


def shutdown() -> None:
    """Stop the engine and disconnect from the other ranks. Collective: returns when all ranks have called shutdown().

    Python calls shutdown() at the end of the script. Operations of other ranks that wait for this rank fail with
    ShutdownError. Afterwards init() may be called again. In a forked process shutdown() does nothing.

    Raises:
        InvalidRequestError: shutdown() was called by a signal handler that interrupted a collective, and that was
            installed so recently that the engine does not know of it.
    """
    global _runtime
    if forked.is_child():
        return
    require_no_driver("shutdown()")
    with _lock:
        runtime, _runtime = _runtime, None
        if runtime is not None:
            atexit.unregister(_shut_down_at_exit)
            runtime.close()
            _stop_watch()
            if runtime.comm is None:
                forked.release(os.environ)


def _shut_down_at_exit() -> None:
    """Shut down when Python exits. If this rank has failed and the job survives a loss, leave without the others."""
    runtime = _runtime
    if runtime is not None and runtime.losses.is_tolerant and exit_code.final() is not None and not forked.is_child():
        runtime.leave()
    else:
        shutdown()


def replace(former: Job, runtime: Job) -> None:
    """Replace the job `former`, which has lost ranks, by `runtime`. Local.

    Raises NotInitializedError: shutdown() has been called in the meantime.
    """
    global _runtime
    with _lock:
        if _runtime is not former:
            raise NotInitializedError(NOT_INITIALIZED)
        _runtime = runtime


def _start_watch() -> None:
    """End this process when its launcher has ended, unless MPISTRAT_LAUNCHER_CHECK_DISABLE is set."""
    global _watch
    _stop_watch()
    try:
        is_disabled = Settings.from_env(os.environ).launcher_check_disable
    except SettingsError:
        is_disabled = False  # init() raises this error on all ranks, after the handshake.
    launcher = None if is_disabled else launcher_here(os.environ)
    if launcher is not None:
        _watch = LauncherWatch(launcher)


def _stop_watch() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def _init_alone() -> Job:
    settings = Settings.from_env(os.environ)
    _configure_logging(settings)
    _warn(horovod_warning(os.environ))
    logger.info("rank 0: the job has one rank, and MPI is not used")
    topology = Topology(0, (platform.node(),))
    return _started(settings, topology, backends_alone(settings), None, Losses(topology))


def _init_mpi(comm: "MPI.Comm | Iterable[int] | None", launched: int, launcher: str) -> Job:
    """Start a job over MPI. Collective."""
    mpi = mpi_library.load_mpi()
    # From here on the other ranks wait for this one, so an error on this rank must end the job.
    from ..transport.mpi import ulfm
    abort.prepare(mpi, mpi.COMM_WORLD.Get_rank(), platform.node(),
                  ulfm.skip_finalize if ulfm.is_fault_tolerant() else None)
    abort.tell_last = _tell_last
    base = mpi_library.communicator(mpi, comm, launched, launcher)
    mpi_library.wait_for_all(base)
    # With `comm`, another job whose ranks are unknown may use the same cores, so the ranks are not bound.
    return connected(base.Dup(), binds=comm is None)


def connected(own: "MPI.Intracomm", binds: bool, hosts: Sequence[str] = ()) -> Job:
    """Connect the ranks of a communicator and start their engines. Collective over it.

    Args:
        own: The communicator, which only the Job may use.
        binds: Whether to bind each rank of a host to a share of the cores.
        hosts: The host of each rank, if known; see handshake.exchange_info.
    """
    rank = own.Get_rank()
    infos = handshake.exchange_info(mpi_library.load_mpi(), own, hosts)
    problem = handshake.problems(infos)
    if problem:
        raise SettingsError(problem)
    settings = [info.settings for info in infos if info.settings is not None]
    different = differing(settings)
    if different:
        raise SettingsError(" ".join(different))
    topology = Topology(rank, unique_hosts([info.host for info in infos], [info.memory_group for info in infos]))
    _configure_logging(settings[rank])
    set_cuda_variables(os.environ, settings[rank].nccl_streams)
    by_host = handshake.without_cupy(infos) if settings[rank].gpu_operations == "auto" else ""
    own_settings = dataclasses.replace(settings[rank], gpu_operations="host") if by_host else settings[rank]
    if rank == 0:
        _warn([*horovod_warning(os.environ), *handshake.differences(infos), *filter(None, [by_host])])
    if binds:
        own_cores.bind(topology, [info.cpus for info in infos], settings[rank].bind)
    processes = {peer: Process(*process) for peer in topology.local_ranks
                 if peer != rank and (process := infos[peer].process) is not None}
    losses = Losses(topology, own, processes, settings[rank].stopped_limit_s)
    if len(topology.hosts) > 1:
        losses.interruption.progress = mpi_library.load_mpi().COMM_SELF.Iprobe
    try:
        losses.watch_hosts(settings[rank].probe_s, settings[rank].lost_after_s)
        backends = backends_over(own, topology, own_settings, losses.interruption)
        return _started(own_settings, topology, backends, own, losses)
    except BaseException:
        losses.stop()
        raise


def _started(settings: Settings, topology: Topology, backends: Backends, comm: "MPI.Intracomm | None",
             losses: Losses) -> Job:
    """Start the engine, and the tracer unless it is off. Collective over `comm`; None: this is the only rank."""
    tracer = None
    if settings.is_recorded:
        offsets = {} if comm is None else clocks.measure(comm)
        # Not for several jobs under one mpirun, nor after a loss of ranks: rank numbers then differ from mpirun's.
        is_told = (settings.recorder == "all" and report.mode(os.environ)
                   and 1 < topology.size == launched_size(os.environ)[0])
        tracer = Tracer(topology, offsets, os.environ, error_text.main_line,
                        partial(report.tell_last, launched_rank(os.environ), environ=os.environ) if is_told else None)
    world = Group(settings, topology, backends, comm, losses.interruption, tracer, losses.processes)
    return Job(settings, world, losses, tracer)


def _tell_last() -> bool:
    """Make all ranks report their last operations, because this rank fails. Returns soon: whether others were asked."""
    runtime = _runtime
    return runtime is not None and runtime.tracer is not None and runtime.tracer.fail_all(_TELL_S)


def _configure_logging(settings: Settings) -> None:
    """Apply MPISTRAT_LOG_LEVEL.

    By default no handler is added: an application that has set up logging gets the messages, and otherwise Python
    prints warnings and errors to stderr (`logging.lastResort`). Without a handler Python prints nothing below WARNING.
    So if the variable asks for such messages and the application has set up no handler, this function adds a handler.
    """
    package = logging.getLogger("mpistrat")
    package.setLevel(settings.logging_level)
    if settings.logging_level < logging.WARNING and not package.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[mpistrat] %(levelname)s %(message)s"))
        package.addHandler(handler)


def _warn(sentences: Iterable[str]) -> None:
    for sentence in sentences:
        logger.warning("mpistrat: %s", sentence)
