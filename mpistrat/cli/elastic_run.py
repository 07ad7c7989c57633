"""`mpistrat run --elastic`: run a job that goes on when ranks or hosts are lost. Called by run.py.

A generation is one mpirun with its ranks. The main thread runs one generation after the other (`supervisor.launch`).
Another thread (`elastic.service`) decides when a generation starts and ends, and on which hosts it runs.
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

from ..core.errors import LaunchError
from ..core.install import numbers
from ..elastic.commits import FILE, claim
from ..elastic.service import Service, addresses_towards
from ..elastic.supervisor_plan import PREEMPTED_CODE, Done, Limits, Start
from ..process.launcher_watch import ABORTED
from ..process.launchers import OPEN_MPI
from ..process.report import ReportReader
from ..trace import last
from .arguments import HostList, counted, parse_list, read_hosts
from .mpirun import Mpirun, find_mpirun, identify
from .ssh import reached
from .supervisor import Interference, Outcome, TimeLimits

AUTO, RESTART = "auto", "restart"
_LOCAL = "localhost"
_SCRIPT_LIMIT_S = 10.0
_CHECKPOINT_EVERY = 10
# Limits for the end of mpirun, after the supervisor has terminated mpirun or a rank has aborted the job.
_LIMITS = TimeLimits(abort_s=2.0, kill_s=2.0, left_s=2.0)
_ANEW = (". Training begins anew, because there is no commit. Add hvd.callbacks.Elastic() to the callbacks "
         "of fit, or call commit() of a state in a custom training loop (docs/elastic.md)")
_PLANNED = (signal.SIGTERM, signal.SIGUSR1)  # the ranks end at their next commit; after a second such signal, at once
_URGENT = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic jobs to the parser of `mpistrat run`."""
    group = parser.add_argument_group("elastic jobs (docs/elastic.md); each of these options makes a job elastic")
    group.add_argument("--elastic", nargs="?", const=AUTO, choices=(AUTO, RESTART), help="go on when ranks or hosts "
                       "are lost. restart: always with new processes; mpirun then needs no options for fault tolerance")
    group.add_argument("--min-np", type=int, metavar="N", help="the least number of ranks (default 1)")
    group.add_argument("--max-np", type=int, metavar="N", help="the greatest number of ranks (default: -np)")
    group.add_argument("--host-discovery-script", metavar="FILE", help="a program that prints the available "
                       "hosts, one per line as host:slots; called every second")
    group.add_argument("--slots-per-host", type=int, metavar="N", help="ranks for a host that the program prints "
                       "without a number (default 1)")
    group.add_argument("--elastic-timeout", type=float, metavar="S",
                       help=f"seconds to wait for enough hosts (default {Limits.timeout_s:g})")
    group.add_argument("--reset-limit", type=int, metavar="N", help="how many times the job may start again")
    group.add_argument("--blacklist-cooldown-range", metavar="S S", help="the least and the most seconds for which "
                       "a lost host gets no ranks; each further loss doubles the time (default 30 600)")
    group.add_argument("--restart-failed", action="store_true", help="start new ranks for lost ones at the next commit")
    group.add_argument("--elastic-checkpoint", default="", metavar="DIR",
                       help="a directory, the same on all hosts, where the chief saves commits")
    group.add_argument("--elastic-checkpoint-every", type=int, metavar="N",
                       help=f"save every Nth commit (default {_CHECKPOINT_EVERY})")


def is_asked_for(options: argparse.Namespace) -> bool:
    """Return whether an option makes the job elastic. As with horovodrun, each option of elastic jobs does so."""
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser)
    return any(getattr(options, name) != unset for name, unset in vars(parser.parse_args([])).items())


def run(options: argparse.Namespace, launched: Callable[..., Outcome]) -> int:
    """Run an elastic job, one generation after the other, and return the exit code of the job.

    `launched`: Runs one generation and returns its Outcome. Its arguments: the options, whose ranks and hosts are those
    of this generation; the Mpirun; additional options for mpirun; environment variables for the ranks; the TimeLimits
    and the Interference for supervisor.launch.

    Raises LaunchError: The input is wrong.
    """
    with _Control() as control, _directory(options) as directory:
        limits, find_hosts = limits_of(options), HostFinder(options)
        first = find_hosts()
        if first is None:
            raise LaunchError(f"no hosts were found: {find_hosts.problem}")
        mpirun = identify(find_mpirun(options.mpirun, os.environ))
        # The main thread alone may receive signals. A thread that does not block SIGCHLD would receive and ignore it.
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
                places = [f"{host}:{slots}" for host, slots in order.hosts]
                if order.generation > 1:
                    has_commit = any(job.newest) or (directory and Path(directory, FILE).exists())
                    _say(f"generation {order.generation} starts with {counted(order.ranks, 'rank')} on "
                         f"{', '.join(places)}" + ("" if has_commit else _ANEW))
                is_here = [host for host, _ in order.hosts] == [_LOCAL]
                wanted = argparse.Namespace(**{**vars(options), "np": order.ranks, "hostfile": None,
                                               "hosts": None if is_here else places})
                tolerant = tolerant_options(mpirun, len(order.hosts)) if options.elastic != RESTART else ()
                ended = launched(wanted, mpirun, tolerant, job.variable(), _LIMITS, control)
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
    """Return the options of mpirun with which ranks survive the loss of another rank (ULFM); () if ULFM is not used.

    ULFM is used with Open MPI 5.0.10 and later, on one host. MPI_Finalize is asynchronous, because it may hang after
    the loss of a rank. A job on several hosts starts new processes instead, because in a test on several hosts some
    collectives of the surviving ranks hung, whichever transport Open MPI 5.0.11 used.
    """
    if mpirun.launcher is not OPEN_MPI or numbers(mpirun.version) < [5, 0, 10] or hosts > 1:
        return ()
    return "--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1"


class _Control(Interference):
    """A context manager in which signals go to the job's Service (elastic/service.py). The Service calls `stop`."""

    ends_all = True

    def __init__(self) -> None:
        # generation: The number of the generation that runs, or starts.
        self.generation, self.is_done = 0, False
        self.told: Collection[Sequence[str]] = ()  # The last operations of that generation's ranks, if it failed.
        self._stop = 0, "", False  # a generation, why it must end, whether its ranks have succeeded
        self.service: Service | None = None  # Receives the signals.
        self._planned_at = math.inf
        self._before: dict[int, object] = {}

    def begin(self, generation: int) -> None:
        """Note that a generation is about to start."""
        self.subject, self.generation, self.told, self.is_done = f"generation {generation}", generation, (), False

    def stop(self, generation: int, why: str, is_done: bool = False) -> None:
        """End a generation's mpirun now, or once it starts. From any thread. `is_done`: Whether all ranks succeeded."""
        self._stop = generation, why, is_done
        os.kill(os.getpid(), ABORTED)

    def why_stop(self) -> str:
        generation, why, is_done = self._stop
        if generation != self.generation:
            return ""
        self.is_done = is_done
        return why

    def why_vain(self, told: ReportReader, gone: Collection[int] = ()) -> str:
        """Tell the Service which ranks started, or ended without init(). Return "", because the Service ends mpirun."""
        assert self.service is not None
        self.service.started(self.generation, told.started, told.without_init - told.in_init)
        return ""

    def takes(self, number: int) -> bool:
        """Handle a signal. Return whether mpirun must not get the signal: true for a first SIGTERM or SIGUSR1."""
        if self.service is None:  # No generation has started.
            os.write(2, f"mpistrat run: {signal.Signals(number).name} has arrived\n".encode())
            sys.exit(PREEMPTED_CODE if number in _PLANNED else 128 + number)
        now = time.monotonic()
        # Some programs send a signal to the process and then to its group. The two count as one signal.
        is_urgent = number in _URGENT or now >= self._planned_at + _LIMITS.second_s
        self._planned_at = min(self._planned_at, now)
        self.service.signalled(signal.Signals(number).name, 128 + number, is_urgent)
        return not is_urgent

    def keep_last(self, told: Collection[Sequence[str]]) -> str:
        """Keep the ranks' last operations until the job ends, because another generation may follow. Return ""."""
        self.told = told
        return ""

    def __enter__(self) -> "_Control":
        for number in (*_PLANNED, *_URGENT):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, _: self.takes(number))
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]


def limits_of(options: argparse.Namespace) -> Limits:
    """Return the limits that the options set. Raises LaunchError: A value is wrong, or two options contradict."""
    if options.np is None and options.max_np is None:
        raise LaunchError("-np is missing. Write the number of ranks: mpistrat run --elastic -np 4 python train.py")
    max_np = options.np if options.max_np is None else options.max_np
    min_np = 1 if options.min_np is None else options.min_np
    if not 1 <= min_np <= max_np:
        raise LaunchError(f"--min-np must be from 1 to --max-np (or -np), which is {max_np}. Received: {min_np}")
    cooldown = Limits.cooldown_s
    if options.blacklist_cooldown_range is not None:
        try:
            first, longest = (float(part) for part in options.blacklist_cooldown_range.replace(",", " ").split())
            if not 0 <= first <= longest:
                raise ValueError
            cooldown = first, longest
        except ValueError:
            raise LaunchError(f"--blacklist-cooldown-range {options.blacklist_cooldown_range} is not two numbers of "
                              "seconds, the lower one first. Write: --blacklist-cooldown-range 30 600") from None
    for name, least in (("elastic_timeout", 0), ("reset_limit", 0), ("slots_per_host", 1),
                        ("elastic_checkpoint_every", 1)):
        value = getattr(options, name)
        if value is not None and not value >= least:  # This also refuses NaN.
            raise LaunchError(f"--{name.replace('_', '-')} must be at least {least}. Received: {value:g}")
    timeout_s = Limits.timeout_s if options.elastic_timeout is None else options.elastic_timeout
    return Limits(min_np, max_np, timeout_s, options.reset_limit, cooldown, options.restart_failed)


class HostFinder:
    """A callable that returns the available hosts: from a script, a hostfile, a list, or the batch system.

    A call returns None after an error. `problem`: The message of the error; "" if the last call returned hosts.
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
                _say(f"the list of hosts cannot be read, so it is unchanged: {error}")
            return None

    def _by_list(self) -> Mapping[str, int]:
        options, hosts = self._options, read_hosts(self._options)
        if hosts is None:
            return allocation(os.environ) or {_LOCAL: options.max_np or options.np}
        return _slots(hosts, options.slots_per_host or 1)

    def _by_script(self) -> Mapping[str, int]:
        script = self._options.host_discovery_script
        done = subprocess.run([str(Path(script).resolve())] if Path(script).is_file() else shlex.split(script),
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=_SCRIPT_LIMIT_S, check=False)
        if done.returncode != 0:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            raise LaunchError(f"--host-discovery-script {script} ended with exit code {done.returncode}: {last}")
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
    """Return the hosts of a Slurm or PBS allocation, with the ranks of each; None outside of an allocation."""
    if "SLURM_JOB_NODELIST" in environ:
        done = subprocess.run(["scontrol", "show", "hostnames", environ["SLURM_JOB_NODELIST"]], capture_output=True,
                              timeout=_SCRIPT_LIMIT_S, check=False, text=True)
        if done.returncode != 0:
            raise LaunchError(f"`scontrol show hostnames` failed: {done.stderr.strip()}")
        names = done.stdout.split()
        counts = slurm_counts(environ.get("SLURM_TASKS_PER_NODE", "1"))
        return dict(zip(names, (counts + counts[-1:] * len(names))[:len(names)], strict=True))
    if "PBS_NODEFILE" in environ:
        names = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
        return {name: names.count(name) for name in names}
    return None


def slurm_counts(text: str) -> list[int]:
    """Return the tasks of each node, given the value of SLURM_TASKS_PER_NODE: [4, 4, 3] for "4(x2),3"."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts


@contextlib.contextmanager
def _directory(options: argparse.Namespace) -> Iterator[str]:
    """Yield the directory of --elastic-checkpoint, or "". During the `with` block, no other job can use it."""
    if not options.elastic_checkpoint:
        yield ""
        return
    directory = Path(options.elastic_checkpoint).expanduser().resolve()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock, problem = claim(directory)
    except BlockingIOError as error:
        raise LaunchError(f"--elastic-checkpoint {directory}: {error}. Wait until that job has ended, or name "
                          "another directory.") from None
    except OSError as error:
        raise LaunchError(f"--elastic-checkpoint {directory}: {error}. Name a directory to which only you can "
                          "write.") from None
    if problem:
        _say(f"--elastic-checkpoint {directory}: another job that uses this directory cannot be detected ({problem})")
    try:
        yield str(directory)
    finally:
        os.close(lock)


_sentences: SimpleQueue[str | None] = SimpleQueue()


def _say(text: str) -> None:
    """Queue a sentence for the thread that prints to stderr. Returns at once, even if stderr blocks."""
    _sentences.put(f"mpistrat run: {text}\n")


def _print_sentences() -> None:
    while (sentence := _sentences.get()) is not None:
        sys.stderr.write(sentence)
        sys.stderr.flush()
