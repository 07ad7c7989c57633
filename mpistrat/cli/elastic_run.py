"""`mpistrat run --elastic`: the supervisor of a job that goes on when ranks or hosts are lost. Called by run.py.

The main thread runs one mpirun after the other (`supervisor.launch`), as the Plan says, which another thread drives
(`elastic.service`).
"""

import argparse
import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import FrameType

from ..core.errors import LaunchError
from ..core.install import numbers
from ..elastic.commits import FILE, claim
from ..elastic.orders import Done, Limits, Start
from ..elastic.service import Service, addresses_towards
from ..elastic.supervisor_plan import PREEMPTED_CODE
from ..process.launcher_watch import ABORTED
from ..process.launchers import OPEN_MPI
from ..process.report import ReportReader
from ..trace import last
from .arguments import counted, read_hosts
from .hostfile import HostList, parse_list
from .mpirun import Mpirun, find_mpirun, identify
from .ssh import reached
from .supervisor import Interference, Outcome
from .termination import TimeLimits

AUTO, RESTART = "auto", "restart"
_LOCAL = "localhost"
_SCRIPT_LIMIT_S = 10.0
_CHECKPOINT_EVERY = 10
# mpirun ends within these times after the supervisor has ended it, or a rank has ended its job.
_LIMITS = TimeLimits(abort_s=2.0, kill_s=2.0, left_s=2.0)
_ANEW = (". It begins anew, since there is no commit. A script makes them by fit(..., callbacks=[..., "
         "hvd.callbacks.Elastic()]), or by commit() of a state in a loop of its own (docs/elastic.md)")
_PLANNED = (signal.SIGTERM, signal.SIGUSR1)  # the ranks end at their next commit; a second one ends them at once
_URGENT = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `mpistrat run`."""
    group = parser.add_argument_group("elastic jobs (docs/elastic.md); each of these options makes a job elastic")
    group.add_argument("--elastic", nargs="?", const=AUTO, choices=(AUTO, RESTART), help="go on when ranks or hosts "
                       "are lost. restart: always with new processes; mpirun then needs no options for fault tolerance")
    group.add_argument("--min-np", type=int, metavar="N", help="the least number of ranks (default 1)")
    group.add_argument("--max-np", type=int, metavar="N", help="the most ranks (default: -np)")
    group.add_argument("--host-discovery-script", metavar="FILE", help="a program that prints the hosts that there are "
                       "now, each as host:slots; called every second")
    group.add_argument("--slots-per-host", type=int, metavar="N", help="ranks for a host that the program prints "
                       "without a number (default 1)")
    group.add_argument("--elastic-timeout", type=float, metavar="S",
                       help=f"seconds to wait for enough hosts (default {Limits.timeout_s:g})")
    group.add_argument("--reset-limit", type=int, metavar="N", help="the most times that the job starts again")
    group.add_argument("--blacklist-cooldown-range", metavar="S S", help="seconds for which a lost host is left out: "
                       "the first time, and at most (default 30 600)")
    group.add_argument("--restart-failed", action="store_true", help="fill the places of lost ranks again, at a commit")
    group.add_argument("--elastic-checkpoint", default="", metavar="DIR",
                       help="a directory, the same on all hosts, where the chief saves commits")
    group.add_argument("--elastic-checkpoint-every", type=int, metavar="N",
                       help=f"commits between two that are saved (default {_CHECKPOINT_EVERY})")


def is_asked_for(options: argparse.Namespace) -> bool:
    """Whether the job is elastic: whether there is an option of such jobs. As with horovodrun, any one says so."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    return any(getattr(options, name) != unset for name, unset in vars(parser.parse_args([])).items())


def run(options: argparse.Namespace, launched: Callable[..., Outcome]) -> int:
    """Run an elastic job and return its exit code: 0, or that of the last generation.

    Args:
        options: Those of `mpistrat run`.
        launched: Runs a generation and returns how its mpirun has ended. It is given the options with the number of
            ranks and the hosts of the generation, the mpirun, options for it, variables for the ranks, TimeLimits and
            an Interference.

    Raises:
        LaunchError: The input is wrong.
    """
    with _Control() as control, _directory(options) as directory:
        return _run(options, launched, control, directory)


def _run(options: argparse.Namespace, launched: Callable[..., Outcome], control: "_Control", directory: str) -> int:
    limits, find_hosts = limits_of(options), HostFinder(options)
    first = find_hosts()
    if first is None:
        raise LaunchError(f"no hosts: {find_hosts.problem}")
    mpirun = identify(find_mpirun(options.mpirun, os.environ))
    # The main thread alone receives signals: a thread that does not block SIGCHLD would get it, and ignore it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PLANNED, *_URGENT, signal.SIGCHLD, ABORTED})
    printer = threading.Thread(target=_print_sentences, name="mpistrat-printer", daemon=True)
    printer.start()
    service = Service(limits, first, find_hosts, addresses_towards(host for host in first if host != _LOCAL), _say,
                      control.stop, lambda hosts: reached(hosts, os.environ), directory,
                      options.elastic_checkpoint_every or _CHECKPOINT_EVERY)
    control.service = service
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while True:
        order = service.next_order(1.0)
        if isinstance(order, Start):
            control.begin(order.generation)
            job = service.job(order.generation)
            if order.generation > 1:
                has_commit = any(job.newest) or (directory and Path(directory, FILE).exists())
                _say(f"generation {order.generation} starts with {counted(order.ranks, 'rank')} on "
                     f"{', '.join(f'{host}:{slots}' for host, slots in order.hosts)}" + ("" if has_commit else _ANEW))
            tolerant = tolerant_options(mpirun, len(order.hosts)) if options.elastic != RESTART else ()
            ended = launched(_for_generation(options, order), mpirun, tolerant, job.variable(), _LIMITS, control)
            service.generation_over(order.generation, ended.code, ended.has_started)
        elif isinstance(order, Done):
            service.close()
            if order.code and (said := last.save(control.told)):
                _say(said)
            if order.why:
                _say(order.why)
            _sentences.put(None)
            printer.join()
            return order.code


def tolerant_options(mpirun: Mpirun, hosts: int) -> tuple[str, ...]:
    """Options with which the ranks of Open MPI's mpirun outlive the loss of some of them; () where they do not.

    ULFM was run with Open MPI 5.0.10 and later. Its MPI_Finalize may hang after a rank was killed, unless it is
    asynchronous. Over several hosts new processes start instead: there one of five collectives of the ranks that were
    left did not end (5.0.11, with each of its transports, without coll/han).
    """
    if mpirun.launcher is not OPEN_MPI or numbers(mpirun.version) < [5, 0, 10] or hosts > 1:
        return ()
    return "--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"


def _for_generation(options: argparse.Namespace, order: Start) -> argparse.Namespace:
    is_here = [host for host, _ in order.hosts] == [_LOCAL]
    hosts = None if is_here else [f"{host}:{slots}" for host, slots in order.hosts]
    return argparse.Namespace(**{**vars(options), "np": order.ranks, "hosts": hosts, "hostfile": None})


class _Control(Interference):
    """Signals for the supervisor, and its orders to end the mpirun that runs. Also a context: handlers of signals."""

    ends_all = True

    def __init__(self) -> None:
        # generation: The one that runs, or starts.
        self.generation, self.is_done = 0, False
        self.told: Collection[Sequence[str]] = ()  # What the ranks of that generation did last, if it has failed.
        self._stop = 0, "", False  # a generation, why it is to end, and whether its ranks have ended well
        self.service: Service | None = None  # Gets the signals.
        self._planned_at = math.inf
        self._before: dict[int, object] = {}

    def begin(self, generation: int) -> None:
        """This generation is about to start."""
        self.subject, self.generation, self.told, self.is_done = f"generation {generation}", generation, (), False

    def stop(self, generation: int, why: str, is_done: bool = False) -> None:
        """End the mpirun of a generation, which may be about to start. In any thread."""
        self._stop = generation, why, is_done
        os.kill(os.getpid(), ABORTED)

    def why_stop(self) -> str:
        generation, why, is_done = self._stop
        if generation != self.generation:
            return ""
        self.is_done = is_done
        return why

    def why_vain(self, told: ReportReader) -> str:
        """Tell the service which processes are ranks: it notices if one ends in vain, however that ends."""
        assert self.service is not None
        self.service.started(self.generation, told.started, told.without_init - told.in_init)
        return ""

    def takes(self, number: int) -> bool:
        """Tell the plan. Only the second SIGTERM, Ctrl-C and their kind reach mpirun."""
        if self.service is None:  # Nothing has started.
            os.write(2, f"mpistrat run: {signal.Signals(number).name} has arrived\n".encode())
            sys.exit(PREEMPTED_CODE if number in _PLANNED else 128 + number)
        now = time.monotonic()
        # Some programs send a signal to the process, and then to its group: both are one.
        is_urgent = number in _URGENT or now >= self._planned_at + _LIMITS.second_s
        self._planned_at = min(self._planned_at, now)
        self.service.signalled(signal.Signals(number).name, 128 + number, is_urgent)
        return not is_urgent

    def keep_last(self, told: Collection[Sequence[str]]) -> str:
        """Nothing is written before the job ends: it may go on."""
        self.told = told
        return ""

    def __enter__(self) -> "_Control":
        def handle(number: int, frame: FrameType | None) -> None:
            self.takes(number)
        for number in (*_PLANNED, *_URGENT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]


def limits_of(options: argparse.Namespace) -> Limits:
    """The limits that the options give. Raises LaunchError: They contradict each other."""
    if options.np is None and options.max_np is None:
        raise LaunchError("how many ranks? Say it with -np, for example: mpistrat run --elastic -np 4 python train.py")
    max_np = options.np if options.max_np is None else options.max_np
    min_np = 1 if options.min_np is None else options.min_np
    if not 1 <= min_np <= max_np:
        raise LaunchError(f"--min-np {min_np} must be from 1 to --max-np (or -np) {max_np}")
    cooldown = Limits.cooldown_s
    if options.blacklist_cooldown_range is not None:
        try:
            first, longest = (float(part) for part in options.blacklist_cooldown_range.replace(",", " ").split())
            if not 0 <= first <= longest:
                raise ValueError
            cooldown = first, longest
        except ValueError:
            raise LaunchError(f"--blacklist-cooldown-range {options.blacklist_cooldown_range} is not two numbers of "
                              "seconds, the lower one first. Write for example: --blacklist-cooldown-range 30 600"
                              ) from None
    for name, least in (("elastic_timeout", 0), ("reset_limit", 0), ("slots_per_host", 1),
                        ("elastic_checkpoint_every", 1)):
        value = getattr(options, name)
        if value is not None and not value >= least:  # NaN is not either.
            raise LaunchError(f"--{name.replace('_', '-')} {value:g} must be at least {least}")
    timeout_s = Limits.timeout_s if options.elastic_timeout is None else options.elastic_timeout
    return Limits(min_np, max_np, timeout_s, options.reset_limit, cooldown, options.restart_failed)


class HostFinder:
    """Returns the present hosts when it is called: of a script, a hostfile, or a list.

    `problem`: Why the last call has returned None; "" if it has not.
    """

    def __init__(self, options: argparse.Namespace):
        self.problem = ""
        self._options = options

    def __call__(self) -> Mapping[str, int] | None:
        try:
            found = self._by_list() if self._options.host_discovery_script is None else self._by_script()
            self.problem = ""
            return found
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:  # LaunchError is a ValueError.
            if self.problem != str(error):
                self.problem = str(error)
                _say(f"the hosts stay as they are: {error}")
            return None

    def _by_list(self) -> Mapping[str, int]:
        options = self._options
        hosts = read_hosts(options)
        if hosts is None:
            return allocation(os.environ) or {_LOCAL: options.max_np or options.np}
        return _slots(hosts, options.slots_per_host or 1)

    def _by_script(self) -> Mapping[str, int]:
        script = self._options.host_discovery_script
        done = subprocess.run([str(Path(script).resolve())] if Path(script).is_file() else shlex.split(script),
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCRIPT_LIMIT_S, check=False)
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise LaunchError(f"--host-discovery-script {script} ends with exit code {done.returncode}: {last}")
        lines = [line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()]
        per_host = self._options.slots_per_host or 1
        return _slots(parse_list(",".join(line if ":" in line else f"{line}:{per_host}" for line in lines)), per_host) \
            if lines else {}


def _slots(hosts: HostList, default: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for host in hosts.hosts:
        found[host.name] = found.get(host.name, 0) + (default if host.slots is None else host.slots)
    return found


def allocation(environ: Mapping[str, str]) -> dict[str, int] | None:
    """The hosts of a Slurm or PBS allocation, with the number of ranks for each; None outside of one.

    Raises LaunchError: Slurm does not say which hosts they are.
    """
    if "SLURM_JOB_NODELIST" in environ:
        done = subprocess.run(["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]], capture_output=True,
                              timeout=_SCRIPT_LIMIT_S, check=False, text=True)
        if done.returncode != 0:
            raise LaunchError(f"scontrol show hostnames fails: {done.stderr.strip()}")
        names = done.stdout.split()
        counts = slurm_counts(environ.get("SLURM_TASKS_PER_NODE", "1"))
        return dict(zip(names, (counts + counts[-1:] * len(names))[:len(names)], strict=True))
    if "PBS_NODEFILE" in environ:
        names = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
        return {name: names.count(name) for name in names}
    return None


def slurm_counts(text: str) -> list[int]:
    """Return the numbers of SLURM_TASKS_PER_NODE, such as "4(x2),3": 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


@contextlib.contextmanager
def _directory(options: argparse.Namespace) -> Iterator[str]:
    """The directory where commits are saved, or "". It is this job's alone meanwhile."""
    if not options.elastic_checkpoint:
        yield ""
        return
    directory = Path(options.elastic_checkpoint).expanduser().resolve()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock, problem = claim(directory)
    except BlockingIOError as error:
        raise LaunchError(f"--elastic-checkpoint {directory}: {error}. Wait until it has ended, or name another "
                          "directory.") from None
    except OSError as error:
        raise LaunchError(f"--elastic-checkpoint {directory}: {error}. Name a directory to which only you can "
                          "write.") from None
    if problem:
        _say(f"--elastic-checkpoint {directory}: a second job with this directory would not be noticed ({problem})")
    try:
        yield str(directory)
    finally:
        os.close(lock)


_sentences: SimpleQueue[str | None] = SimpleQueue()


def _say(text: str) -> None:
    """Have a sentence printed. Returns at once: who reads stderr may be slow, and the supervisor must not wait."""
    _sentences.put(f"mpistrat run: {text}\n")


def _print_sentences() -> None:
    while (sentence := _sentences.get()) is not None:
        sys.stderr.write(sentence)
        sys.stderr.flush()
