"""The Runtime: init wires settings, topology, planes and engine together; shutdown takes them apart in reverse."""

import atexit
import logging
import os
import platform
import sys
import threading
import time
from typing import Any

from ..core import forked
from ..core.errors import InvalidRequestError, NotInitializedError, SettingsError, StallError
from ..core.settings import Settings, differing, horovod_names
from ..core.stalls import describe_wait
from ..core.topology import Topology, unique_hosts
from ..engine import autotune
from ..engine.controller import Controller
from ..engine.engine import Engine
from ..engine.executor import Executor
from ..gpu.executor import GpuExecutor
from ..transport.mpi import library
from . import abort, handshake
from .backends import Backends, backends_alone, backends_over
from .launch_env import launched_size
from .launcher_watch import LauncherWatch, launcher_here
from .own_place import require_own_place

logger = logging.getLogger(__name__)

NOT_INITIALIZED = "mpistrat has not been initialized; use hvd.init()."


class Runtime:
    """Everything that lives between init() and shutdown()."""

    def __init__(self, settings: Settings, topology: Topology, planes: Backends, comm: Any):
        self.settings, self.topology, self.comm = settings, topology, comm
        self._planes = planes
        self._in_cluster = False
        self._device = GpuExecutor(topology.rank, topology.size, planes.data, settings)
        self._executor = Executor(planes.data, topology.size, settings.fusion_bytes, self._device)
        self.engine = Engine(Controller(topology, planes.control, self._executor, settings, planes.agreement,
                                        self._keep_log if settings.autotune else None))
        if settings.autotune and settings.autotune_log:
            self._use_log()
        self.engine.start()

    def _use_log(self) -> None:
        """Let the engine reduce as an earlier run's autotune has chosen, if there is a log of that. Collective."""
        choice, path = None, self.settings.autotune_log
        if self.topology.rank == 0 and os.path.exists(path):
            try:
                with open(path, encoding="utf-8") as file:
                    choice = autotune.read_report(file.read(), self._executor.knobs())
            except (OSError, ValueError) as error:
                logger.warning("MPISTRAT_AUTOTUNE_LOG=%s is not used, and a new search begins: %s", path, error)
        choice = choice if self.comm is None else self.comm.bcast(choice)
        if choice is not None:
            self._executor.choose(choice)
            self.engine.controller.stop_tuning()

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
        return self._planes.data.in_use

    def close(self) -> None:
        """Wait until all ranks have called this, stop the engine and free what it used. Collective.

        Other ranks may be out of reach. They are waited for within the limit on stalls, and MPI_Finalize, which would
        wait for ever, is not called after that: the job ends when this script does.
        """
        self.engine.end(self._report_waiting)
        error = self.engine.controller.life.error
        is_well = error is None or isinstance(error, StallError)
        if self.comm is not None and is_well and not self._in_cluster and not self._all_are_here():
            return
        if error is not None:
            return  # The other ranks are in no state to free communicators together with this one.
        self._device.close()
        self._planes.close()
        if self.comm is not None:
            self.comm.Free()

    def join_cluster(self) -> None:
        """Do not wait in `close` until the others are in theirs. Collective.

        In a cluster a rank says that it submits no more when it begins to wait for the chief, and closes when the chief
        has ended: the chief would wait for ranks that wait for the chief.
        """
        self._in_cluster = True

    def _all_are_here(self) -> bool:
        """Wait until all ranks have come to their end; whether they have, within the limit."""
        limit_s = self.settings.limit_s
        if library.wait_for_all(self.comm, limit_s):
            return True
        from ..transport.mpi.peer_wait import never_free
        never_free(self)  # MPI has been given some of its memory, and is not told to give it back.
        others = [rank for rank in range(self.topology.size) if rank != self.topology.rank]
        _end_job_at_exit(f"shutdown: {describe_wait(self.topology, others, limit_s)}")
        return False

    def abandon(self, reason: str) -> None:
        """End this rank's part without the other ranks, some of which have died; `reason` says which. Local."""
        if self.comm is not None:
            library.finalize_without_barrier(library.load_mpi())
        self.engine.abandon(reason)

    def _report_waiting(self, waited_s: float) -> None:
        logger.info("rank %d has shut down and has waited %.0f s for the other ranks to do so", self.topology.rank,
                    waited_s)


_runtime: Runtime | None = None
_watch: LauncherWatch | None = None
_lock = threading.Lock()
_lost = ""  # why this rank must not call MPI_Finalize, if it must not


def _leave_to_parent() -> None:
    """In a forked process: refuse what only the rank can do. Fields, and so the getters, remain."""
    global _lock
    _lock = threading.Lock()  # Another thread may have held the old one, which is not there.
    if _runtime is not None:
        _runtime.engine.disown(forked.error())


os.register_at_fork(after_in_child=_leave_to_parent)


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
        NotInitializedError: This process was forked from a rank, or started by one with the rank's environment.
        SettingsError: An MPISTRAT_ variable is wrong on some rank, or not the same on all; on every rank.
        MissingDependencyError: mpi4py cannot load an MPI library.
        MpistratError: MPI sees fewer ranks than were started, or lacks the thread level.
    """
    global _runtime
    if process_sets:
        raise InvalidRequestError("process sets other than the global one are not available. For a job on fewer ranks, "
                                  f"use init(comm=[...]). Received: process_sets={process_sets!r}")
    forked.require_rank()
    require_own_place(os.environ)
    with _lock:
        if _runtime is not None:
            return
        began = time.monotonic()
        size, launcher = launched_size(os.environ)
        mpi = sys.modules.get("mpi4py.MPI")
        _watch_launcher(True)  # Before MPI: a rank may wait there for others for ever.
        try:
            if comm is None and size == 1 and (mpi is None or mpi.COMM_WORLD.Get_size() == 1):
                runtime = _init_alone()
            else:
                runtime = _init_mpi(comm, size, launcher)
        except BaseException:
            _watch_launcher(False)
            raise
        forked.claim(os.environ)
        _runtime = runtime
        atexit.register(shutdown)
    topology = runtime.topology
    if topology.rank == 0:
        logger.info("%d ranks on %d hosts, ready in %.2f s", topology.size, len(topology.hosts),
                    time.monotonic() - began)


def shutdown() -> None:
    """End what init() began; init() may be called again. Collective: returns when all ranks have called it.

    It is called at the end of the script by itself. Operations that other ranks still wait for then fail there with
    ShutdownError. In a process that was forked from a rank it does nothing.
    """
    global _runtime
    if forked.is_child():
        return
    with _lock:
        runtime, _runtime = _runtime, None
        if runtime is not None:
            atexit.unregister(shutdown)
            runtime.close()
            _watch_launcher(False)
            if runtime.comm is None:
                forked.release(os.environ)


def _watch_launcher(begins: bool) -> None:
    """Begin or cease to end this process when its launcher has ended."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None
    launcher = launcher_here(os.environ) if begins and _wants_watch() else None
    if launcher is not None:
        _watch = LauncherWatch(launcher)


def _wants_watch() -> bool:
    try:
        return not Settings.from_env(os.environ).launcher_check_disable
    except SettingsError:
        return True  # The ranks tell each other of the error in what follows.


def _end_job_at_exit(reason: str) -> None:
    """Have the job end when this rank's script does, with an error, and without MPI_Finalize."""
    global _lost
    _lost = reason


def _end_job_if_lost() -> None:
    if _lost and not forked.is_child():
        mpi = library.load_mpi()
        abort.end_job(mpi, mpi.COMM_WORLD.Get_rank(), platform.node(), _lost)


def _init_alone() -> Runtime:
    settings = Settings.from_env(os.environ)
    _configure(settings, chief=True)
    return Runtime(settings, Topology(0, (platform.node(),)), backends_alone(), None)


def _init_mpi(comm: Any, launched: int, launcher: str) -> Runtime:
    mpi = library.load_mpi()
    # From here on, an error on this rank alone would leave the others waiting.
    abort.end_job_on_exception(mpi, mpi.COMM_WORLD.Get_rank(), platform.node())
    # Called after shutdown(), for that is registered later. It cannot be registered when the script ends already.
    atexit.unregister(_end_job_if_lost)
    atexit.register(_end_job_if_lost)
    base = library.communicator(mpi, comm, launched, launcher)
    library.wait_for_all(base)
    own = base.Dup()
    rank = own.Get_rank()
    everybody = handshake.exchange_info(mpi, own)
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
        for sentence in handshake.differences(everybody):
            logger.warning("%s", sentence)
    return Runtime(settings[rank], topology, backends_over(own, topology, settings[rank]), own)


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
