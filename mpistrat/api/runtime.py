"""init() connects settings, topology, backends and engine. shutdown() closes these parts in reverse order.

Between init() and shutdown() a `Job` holds these parts, and `current()` returns the Job to other modules. Any thread
may call the functions of this module; a lock makes init() and shutdown() exclude each other.
"""

import atexit
import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from ..core import annotations, forked, handle, signal_handlers
from ..core.errors import InvalidRequestError, MpistratError, NotInitializedError, SettingsError
from ..core.handle import require_no_driver
from ..core.install import pip_extra
from ..core.request import barrier_request
from ..core.settings import Settings, differing, horovod_warning
from ..core.slowest import Waits
from ..core.topology import Topology, describe_by_rank, rank_list, ranks_by_value, unique_hosts
from ..core.version import __version__
from ..elastic import membership
from ..gpu.assignment import set_cuda_variables
from ..process import abort, cores, error_text, exit_code, procfs, report
from ..process.cores import own_cpus
from ..process.launch_env import launched_rank, launched_size
from ..process.launcher_watch import LauncherWatch, launcher_here, require_own_place
from ..process.procfs import Process
from ..trace import clocks
from ..trace.reports import waits
from ..trace.tracer import Tracer
from ..transport.mpi import mpi_library
from .group import Group, backends_over
from .job import Job, Losses, log_step
from .process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)

_TELL_S = 0.5  # The longest time that a rank that fails takes to report its last operations.

_runtime: Job | None = None
_watch: LauncherWatch | None = None
_lock = threading.RLock()  # A signal handler may call shutdown() while this thread waits in shutdown().


def _disable_after_fork() -> None:
    """Make collectives raise an error, but not rank() and size(). Called in a process that a rank has forked."""
    global _lock
    _lock = threading.RLock()  # A thread of the parent may have held the old lock, and does not exist here.
    if _runtime is not None:
        _runtime.disable_after_fork(forked.error())


os.register_at_fork(after_in_child=_disable_after_fork)


def current() -> Job:
    """Return the Job that init() made. Local. Raises NotInitializedError: Before init() and after shutdown()."""
    runtime = _runtime
    if runtime is None:
        raise NotInitializedError(global_process_set.why_none)
    return runtime


def group_of(operation: str, process_set: int) -> Group:
    """Return the group of the process set with the id `process_set`. Local. Error texts name the `operation`.

    Raises InvalidRequestError: The set was removed, or this rank is not in the set. Also raises the error of current().
    """
    group = (_runtime or current()).registry.groups.get(process_set)
    if group is None:
        raise InvalidRequestError(f"{operation}: process set {process_set} does not exist or has not been registered.")
    return group


def waits_between(began_s: float, ended_s: float, process_set: int = 0) -> Waits:
    """Return how long this rank waited for collectives of a process set between two past times. Local.

    Both times are in seconds of `time.perf_counter`, which reads CLOCK_MONOTONIC, as the engine does. The engine keeps
    records of its last operations only. The result is for the part of the time span that has records.
    `seconds` in the result is the length of this part, or 0.
    """
    try:
        traced = group_of("waits_between", process_set).traced
    except MpistratError:  # After shutdown(), or the process set was removed.
        return Waits()
    began, ended = int(began_s * 1e9), int(ended_s * 1e9)
    kept = traced.ring.since(0)
    operations = [each for each in kept if began < each.delivered and each.agreed < ended]
    if not operations:
        return Waits()
    if kept[0].serial:  # Earlier records were dropped.
        began = max(began, kept[0].delivered)
    if began >= ended:
        return Waits()
    return waits(operations, (), (began, ended))


def is_initialized() -> bool:
    """Return whether init() has been called, and shutdown() has not been called after it. Local."""
    return _runtime is not None


def init(comm: "MPI.Comm | Iterable[int] | None" = None,
         process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connect to the other ranks and start the engine. Collective; a repeated call only registers process sets.

    Without a launcher in the environment the job has one rank, and no MPI library is loaded. If mpi4py was told not to
    initialise MPI (mpi4py.rc.initialize = False), init() initialises MPI. MPI is finalised when Python exits.

    Args:
        comm: A list of ranks of MPI_COMM_WORLD, or an mpi4py communicator. Default: all ranks. Other ranks in a
            repeated call have no effect, and cause a warning.
        process_sets: Process sets to register, the same on all ranks. "dynamic" is accepted as in Horovod, and ignored.

    Raises:
        InvalidRequestError: On all ranks, if the process sets cannot be registered; see add_process_set. The job is
            initialised nevertheless.
        NotInitializedError: This process was forked from a rank, or was started with the environment of a rank.
        SettingsError: On every rank, if an MPISTRAT_ variable is invalid on any rank, or differs among the ranks.
        MissingDependencyError: mpi4py cannot load an MPI library.
        MpistratError: MPI sees fewer ranks than the launcher started, or MPI's thread level is below THREAD_SERIALIZED.
        ValueError: `comm` is neither a list nor a communicator, or has wrong ranks, or does not have this rank.
    """
    if not (comm is None or hasattr(comm, "Get_group") or isinstance(comm, Iterable)):
        raise InvalidRequestError("init(comm=) must be a list of ranks, or an mpi4py communicator. Without it the job "
                                  f"has all ranks: hvd.init(). Received: {comm!r}")
    forked.require_rank()
    require_own_place(os.environ)
    runtime = _connect(comm)
    if not process_sets or process_sets == "dynamic":
        return
    if isinstance(process_sets, str) or not isinstance(process_sets, Iterable):
        raise InvalidRequestError('process_sets must be a list of ProcessSet, or "dynamic". '
                                  f"Received: {process_sets!r}")
    runtime.registry.add([each for each in process_sets if getattr(each, "process_set_id", None) is None])


def _connect(comm: "MPI.Comm | Iterable[int] | None") -> Job:
    """Return the Job. If there is none, connect to the other ranks first, which is collective."""
    global _runtime
    with _lock:
        if _runtime is not None:
            if comm is not None:
                _warn_of_ranks(comm, _runtime)
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
        abort.hand_on(launched_rank(os.environ), os.environ, _interrupt_soon)
        if (member := membership.current()) is not None:
            member.connected()
        global_process_set.mpi_comm = cast("MPI.Comm", comm) if hasattr(comm, "Get_group") else None
        atexit.register(_shut_down_at_exit)
    topology = runtime.topology
    log_step(topology.rank, "%s; local rank %d of %d on %s; %d ranks on %d hosts (%s); ready in %.2f s",
             "worker" if topology.rank else "chief", topology.local_rank, topology.local_size, topology.host,
             topology.size, len(topology.hosts), ", ".join(topology.hosts), time.monotonic() - began)
    return runtime


def _warn_of_ranks(comm: "MPI.Comm | Iterable[int]", runtime: Job) -> None:
    """Log a warning on rank 0 if the argument of a repeated init() has other ranks than the job. Local."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    ranks = [0] if runtime.comm is None else mpi_library.ranks_in(runtime.comm, mpi.COMM_WORLD)
    given = mpi_library.ranks_in(cast("MPI.Comm", comm), mpi.COMM_WORLD) if hasattr(comm, "Get_group") else sorted(comm)
    if given != ranks and runtime.topology.rank == 0:
        logger.warning("mpistrat: init(comm=%s) has no effect, because the job has begun, with the ranks %s of "
                       "MPI_COMM_WORLD. For other ranks call shutdown() first.", given, ranks)


def shutdown() -> None:
    """Stop the engine and disconnect from the other ranks. Collective: returns when all ranks have called shutdown().

    Python calls shutdown() at the end of the script. Operations of other ranks that wait for this rank fail with
    ShutdownError. Afterwards init() may be called again. In a forked process shutdown() does nothing.

    Raises:
        InvalidRequestError: The caller is a finalizer (__del__) or signal handler that has interrupted a collective.
            mpistrat notices a new signal handler within 0.1 s. In later collectives the handler may call shutdown().
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
    """Shut down when Python exits. If this rank has failed and the job can go on without it, wait for no other rank."""
    runtime = _runtime
    if runtime is not None and runtime.losses.is_tolerant and exit_code.final() is not None and not forked.is_child():
        runtime.leave()
    else:
        shutdown()


def replace(former: Job, runtime: Job) -> None:
    """Make `runtime` the current Job, in place of `former`, whose job has lost ranks. Local.

    Raises NotInitializedError: shutdown() has been called in the meantime.
    """
    global _runtime
    with _lock:
        if _runtime is not former:
            raise NotInitializedError(global_process_set.why_none)
        _runtime = runtime


def _start_watch() -> None:
    """Start a thread that ends this process when its launcher ends, unless MPISTRAT_LAUNCHER_CHECK_DISABLE is set."""
    global _watch
    _stop_watch()
    try:
        is_disabled = Settings.from_env(os.environ).launcher_check_disable
    except SettingsError:
        is_disabled = False  # init() raises this error on all ranks, after the handshake.
    if not is_disabled and (launcher := launcher_here(os.environ)) is not None:
        _watch = LauncherWatch(launcher)


def _stop_watch() -> None:
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def _init_alone() -> Job:
    settings, topology = Settings.from_env(os.environ), Topology(0, (platform.node(),))
    _configure_logging(settings)
    _warn(horovod_warning(os.environ))
    logger.info("rank 0: the job has one rank, and MPI is not used")
    return _started(settings, topology, None, Losses(topology))


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
    """Connect the ranks of `own` and return the Job. Collective over `own`, which only the Job may use afterwards.

    `binds`: Whether to bind each rank to a share of the cores of its host. `hosts`: The host of each rank, if known.
    """
    rank = own.Get_rank()
    infos = exchange_info(mpi_library.load_mpi(), own, hosts)
    settings = [info.settings for info in infos if info.settings is not None]
    if problem := problems(infos) or " ".join(differing(settings)):
        raise SettingsError(problem)
    topology = Topology(rank, unique_hosts([info.host for info in infos], [info.memory_group for info in infos]))
    _configure_logging(settings[rank])
    set_cuda_variables(os.environ, settings[rank].nccl_streams)
    by_host = without_cupy(infos) if settings[rank].gpu_operations == "auto" else ""
    own_settings = dataclasses.replace(settings[rank], gpu_operations="host") if by_host else settings[rank]
    if rank == 0:
        _warn([*horovod_warning(os.environ), *differences(infos), *filter(None, [by_host])])
    if binds:
        bind_cores(topology, [info.cpus for info in infos], settings[rank].bind)
    processes = {peer: Process(*process) for peer in topology.local_ranks
                 if peer != rank and (process := infos[peer].process) is not None}
    losses = Losses(topology, own, processes, settings[rank].stopped_limit_s)
    if len(topology.hosts) > 1:
        losses.interruption.progress = mpi_library.load_mpi().COMM_SELF.Iprobe
    try:
        losses.watch_hosts(settings[rank].probe_s, settings[rank].lost_after_s)
        return _started(own_settings, topology, own, losses)
    except BaseException:
        losses.stop()
        raise


def _started(settings: Settings, topology: Topology, comm: "MPI.Intracomm | None", losses: Losses) -> Job:
    """Start the engine, and a tracer if `settings` ask for it. Return the Job. Collective; `comm` None: one rank."""
    backends, tracer = backends_over(comm, topology, settings, losses.interruption), None
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
    """Make all ranks report their last operations, because this rank fails. Returns False if reports are off."""
    runtime = _runtime
    return runtime is not None and runtime.tracer is not None and runtime.tracer.fail_all(_TELL_S)


def _configure_logging(settings: Settings) -> None:
    """Apply MPISTRAT_LOG_LEVEL.

    If the application has a log handler, the handler gets the messages. Without any handler, Python prints warnings and
    errors to stderr (`logging.lastResort`), but no message below WARNING. So if MPISTRAT_LOG_LEVEL asks for such
    messages and there is no handler, this function adds a handler.
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


# -- the handshake of init(): ranks exchange host, settings and versions, and report differences ----------------------


@dataclass(frozen=True)
class RankInfo:
    """The facts that a rank sends to all other ranks in init()."""

    host: str
    memory_group: int  # The lowest rank that shares memory with this rank.
    settings: Settings | None  # The settings of the rank; None if they are not valid.
    problem: str  # The error in the settings, or "".
    # The versions of Python and of packages, by name; "none" for a package that is not installed.
    versions: dict[str, str]
    script: str  # A digest of the script.
    cpus: list[int]  # The CPUs that the rank may use.
    # The process of the rank, as the first four fields of procfs.Process; None if /proc does not show it.
    process: tuple[int, int, int, int] | None


def exchange_info(mpi: ModuleType, comm: "MPI.Comm", hosts: Sequence[str] = ()) -> list[RankInfo]:
    """Return the RankInfo of every rank, in rank order. Collective over `comm`. Raises the errors of from_texts.

    `hosts`: The host of each rank, if known: ranks with equal hosts share memory. Without it, MPI finds such ranks.
    """
    if hosts:
        memory_group = hosts.index(hosts[comm.Get_rank()])
    else:
        shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
        memory_group = shared.bcast(comm.Get_rank())
        shared.Free()
    settings, problem = None, ""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        problem = str(error)
    process = procfs.find(os.getpid())
    own = RankInfo(platform.node(), memory_group, settings, problem, versions(), script_digest(), sorted(own_cpus()),
                   None if process is None else (process.pid, process.started, process.parent, process.group))
    return from_texts(comm.allgather(to_text(own)))


def to_text(info: RankInfo) -> str:
    return json.dumps(dataclasses.asdict(info))


def from_texts(texts: Sequence[str]) -> list[RankInfo]:
    """Return the RankInfo of each rank, in rank order. `texts`: The result of to_text() of each rank.

    Raises SettingsError: On all ranks, if they have different versions of mpistrat. The text names the versions.
    """
    received = [json.loads(text) for text in texts]
    versions = [each.get("versions", {}).get("mpistrat", "unknown") for each in received]
    if len(set(versions)) > 1:
        raise SettingsError("The ranks have different versions of mpistrat, which cannot run together: "
                            f"{describe_by_rank(versions)}. Install the same version on all hosts.")
    return [RankInfo(**{**each, "settings": None if each["settings"] is None else Settings(**each["settings"])})
            for each in received]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that should be the same on all ranks, by name."""
    found = {"Python": platform.python_version(), "mpistrat": __version__}
    # cupy has a package for each version of CUDA.
    for name, *packages in (("tensorflow",), ("tensorflow-cpu",), ("keras",), ("numpy",),
                            ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")):
        found[name] = "none"
        for package in packages or (name,):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
    return found


def script_digest() -> str:
    """Return the SHA-256, as text, of the script that Python was started with; "no file" if it cannot be read."""
    try:
        with open(_script(), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return "no file"


def _script() -> str:
    """Return the path of the script that Python was started with; "" if a program that embeds Python gave none."""
    return sys.argv[0] if sys.argv else ""


def problems(infos: Sequence[RankInfo]) -> str:
    """Return each error in the settings of the ranks, with the ranks that have it; "" if there are no errors."""
    ranks = ranks_by_value(info.problem for info in infos)
    ranks.pop("", None)
    return " ".join(f"{'all ranks' if len(where) == len(infos) else f'ranks {rank_list(where)}'}: {problem}"
                    for problem, where in ranks.items())


def differences(infos: Sequence[RankInfo]) -> list[str]:
    """Return a sentence for each version that differs among the ranks, and a sentence if the script differs."""
    subjects = {f"version of {name}": [info.versions[name] for info in infos] for name in infos[0].versions}
    subjects[f"content of the script {_script()}"] = [info.script[:12] for info in infos]
    return [f"The ranks differ in the {subject}: {describe_by_rank(values)}" for subject, values in subjects.items()
            if len(set(values)) > 1]


def without_cupy(infos: Sequence[RankInfo]) -> str:
    """Return a warning if only some ranks have cupy, because GPU tensors are then reduced on the host; otherwise ""."""
    lacking = [rank for rank, info in enumerate(infos) if info.versions.get("cupy", "none") == "none"]
    return "" if len(lacking) in (0, len(infos)) else (
        f"Ranks {rank_list(lacking)} have no cupy ({pip_extra('gpu')}), so all ranks copy tensors on GPUs to the host, "
        "and reduce them there.")


# -- the cores of this rank -------------------------------------------------------------------------------------------


def bind_cores(topology: Topology, cpus_of: Sequence[Sequence[int]], wanted: str) -> None:
    """Bind this rank's threads to an equal, disjoint share of the cores that the ranks of this host may use. Local.

    If the ranks of the host may use different CPUs, the launcher, the user or the start-up code of `mpistrat run` has
    bound them, and this function only logs the CPUs. TensorFlow later makes one thread for each CPU of the share.
    `cpus_of`: The CPUs that each rank may use. `wanted`: The value of MPISTRAT_BIND.
    """
    local = [cpus_of[rank] for rank in range(topology.size) if topology.host_of[rank] == topology.host]
    own = frozenset(cpus_of[topology.rank])
    if not own or len(local) == 1:
        return

    def log(cpus: frozenset[int], why: str) -> None:
        log_step(topology.rank, "runs on %d CPUs of %s, %s: %s", len(cpus), topology.host, why,
                 ",".join(map(str, sorted(cpus))))

    if wanted not in ("all", "cores"):
        log(own, f"as it was started: MPISTRAT_BIND={wanted}")
    elif any(frozenset(cpus) != own for cpus in local):
        log(own, "as it was started")
        if topology.rank == 0:
            _warn_of_single_cores(local)
    else:
        gpus = cores.gpu_cpus() if "CUDA_VISIBLE_DEVICES" not in os.environ else []
        chosen = cores.share(own, topology.local_rank, topology.local_size, gpus)
        if chosen is None:
            log(own, f"because the host has fewer cores than its {len(local)} ranks")
            return
        try:
            cores.take(chosen)
        except OSError as error:
            log(own, f"because it cannot be bound: {error}")
        else:
            log(chosen, "its share")


def _warn_of_single_cores(local: Sequence[Sequence[int]]) -> None:
    """Warn if the launcher has bound each rank to a single core of many, as Open MPI's mpirun does for two ranks."""
    try:
        all_cores = cores.physical_cores(os.sched_getaffinity(os.getppid()))  # The launcher's own process is not bound.
    except OSError:
        return
    if len(all_cores) >= 2 * len(local) and all(len(cores.physical_cores(cpus)) == 1 for cpus in local):
        each = len(all_cores) // len(local)
        logger.warning(
            "mpistrat: the launcher has bound each rank, and so TensorFlow's threads, to only one of %d cores. Start "
            "the job with `mpistrat run`, or pass `--bind-to none` to mpirun, or `--map-by slot:PE=%d` to Open MPI's "
            "mpirun. Each rank then has %d cores.", len(all_cores), each, each)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------

# `mpistrat run` interrupts the scripts of all ranks in the same step. A script that catches KeyboardInterrupt around
# fit may then save the model, for which all ranks may have to call the same collectives. A rank that is one step ahead
# would deadlock: it waits in the next step, and the other ranks in the save. So after the signal, a background thread
# of each rank enters a barrier. The engines of all ranks execute in one order, so the first operation after the barrier
# is the same on all ranks, and interrupts the script on each of them. A rank that does not come to the barrier soon, or
# to another operation, is interrupted at once.

_LIMIT_S = 2.0  # The longest wait for the barrier.
_LOOK_S = 0.001


def _interrupt_soon() -> None:
    """Start a thread that sends SIGINT to this process, if possible before the same operation on all ranks. Local."""
    signal_handlers.expect()
    threading.Thread(target=_interrupt, name="mpistrat-interrupt", daemon=True).start()


def _interrupt() -> None:
    main, lock = threading.main_thread().ident, threading.Lock()
    is_due, has_come = threading.Event(), threading.Event()

    def come() -> None:
        is_due.set()
        # A main thread that drives would be interrupted inside a collective. After `expect` it does not start to drive.
        if threading.get_ident() != main and main not in handle.drivers:
            with lock:
                if not has_come.is_set():
                    has_come.set()
                    os.kill(os.getpid(), signal.SIGINT)

    try:
        controller = (engine := current().engine).controller
        if controller.topology.size > 1:
            engine.submit(barrier_request("Ctrl-C"), []).when_done(
                lambda _: setattr(controller.executor, "before_next", come))
            is_due.wait(_LIMIT_S)
    except MpistratError:
        pass  # The engine has ended, or this is a second Ctrl-C.
    while not has_come.is_set():
        come()
        time.sleep(_LOOK_S)
