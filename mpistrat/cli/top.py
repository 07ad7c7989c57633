"""`mpistrat top`: show a running job, and update the display. Called by main.py.

Rank 0 of each job writes a status file once a second, on its own host. top reads the status files in a directory that
belongs to this user alone (mode 0700). If a file is truncated, or is of another user or of another version of mpistrat,
top does not show the job, and says why.
"""

import argparse
import io
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ..core.errors import LaunchError, MissingDependencyError
from ..core.install import pip_extra
from ..core.ownership import foreign
from ..core.slowest import LEAST_COST, Waits, behind, figure, slowest
from ..core.topology import rank_list
from ..process import procfs
from ..trace.reports import VERSION, status_directory
from ..trace.stragglers import cause_of
from .arguments import Parser, counted, positive_seconds

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from rich.console import Console, RenderableType

# -- the status files -------------------------------------------------------------------------------------------------

_SILENT_S = 10.0  # A rank or a job that has not reported for this time is called silent.


@dataclass(frozen=True)
class Outstanding:
    """An operation that a rank submitted `since_s` seconds ago, and that is not complete."""

    name: str
    since_s: float


@dataclass(frozen=True)
class RankStatus:
    """The last report of a rank."""

    # rank, host, pid: The rank, its host, and its process ID.
    rank: int
    host: str
    pid: int
    # steps, rows: Numbers since the start; None if nothing counts them.
    steps: int | None
    rows: int | None
    # operations, bytes: Number of collectives since the start, and the bytes that they have reduced or sent.
    operations: int
    bytes: int
    # computing, waiting, moving, hidden: Shares of the last interval in which the rank had no collective in flight,
    # waited for other ranks, waited for the bytes, and waited for ranks or bytes during the backward pass.
    computing: float
    waiting: float
    moving: float
    hidden: float
    # cores, delayed: In the last interval, the number of cores that the rank's threads used, and the seconds per second
    # in which threads were ready to run but had no core.
    cores: float
    delayed: float
    place: str  # The place of the main thread in the script; "" if not known.
    rss_bytes: int  # The memory of the process.
    outstanding: tuple[Outstanding, ...]  # The operations that the rank waits for.
    written: float  # The time of the report, in seconds since 1970.


@dataclass(frozen=True)
class JobStatus:
    """The content of the status file of a job. Times are in seconds since 1970."""

    job: str
    started: float
    written: float
    size: int
    script: str
    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True)
class Found:
    """The jobs that the status files in a directory describe, and a sentence on each file that cannot be shown."""

    jobs: tuple[JobStatus, ...]
    problems: tuple[str, ...] = ()


def read(directory: Path, uid: int, time_s: float) -> Found:
    """Return the jobs of user `uid` in `directory`, in order of start. `time_s`: Now, in seconds since 1970."""
    try:
        if (problem := foreign(directory.lstat(), uid, 0o077)):
            return Found((), (f"{directory} {problem}: its files are not read",))
        paths = sorted(directory.glob("*.json"))
    except FileNotFoundError:
        return Found(())
    jobs, problems = [], []
    for path in paths:
        try:
            job = _read_file(path, uid)
            silent_s, first = time_s - job.written, procfs.find(job.ranks[0].pid) if job.ranks else None
            # A job that is killed leaves its file behind. Later another process may get the pid of its first rank.
            if silent_s >= _SILENT_S and (first is None or silent_s > time.clock_gettime(time.CLOCK_BOOTTIME)
                                          - first.started / os.sysconf("SC_CLK_TCK")):
                raise ValueError(f"the file was written {silent_s:.0f} s ago, and the first rank has ended. Remove it")
            jobs.append(job)
        except FileNotFoundError:
            continue  # The job has just ended.
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    return Found(tuple(sorted(jobs, key=lambda job: job.started)), tuple(problems))


def _read_file(path: Path, uid: int) -> JobStatus:
    """Read one status file, which user `uid` must own. Raises ValueError with the problem, or OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
        if (problem := foreign(os.fstat(file.fileno()), uid, 0o022)):
            raise ValueError(f"the file {problem}")
        text = file.read()
    try:
        content = json.loads(text)
    except ValueError:
        raise ValueError("the file is truncated, or is not JSON") from None
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise ValueError(f"the file has version {version}, but this mpistrat reads version {VERSION}. Remove the file "
                         "if its job has ended")
    try:
        return parse(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the file is incomplete: {error}. Another version of mpistrat has written the file. Remove "
                         "it if its job has ended") from None


def parse(content: Mapping[str, Any]) -> JobStatus:
    """Parse the content of a status file. Unknown fields are ignored. Raises KeyError or TypeError."""
    ranks = []
    for each in content["ranks"]:
        outstanding = tuple(Outstanding(str(one["name"]), float(one["since_s"])) for one in each["outstanding"])
        values = {one.name: each[one.name] for one in fields(RankStatus)}
        ranks.append(RankStatus(**{**values, "outstanding": outstanding}))
    return JobStatus(str(content["job"]), float(content["started"]), float(content["written"]), int(content["size"]),
                     str(content["script"]), tuple(sorted(ranks, key=lambda rank: rank.rank)))


# -- the summary of a job ---------------------------------------------------------------------------------------------

_STALLED_S = 5.0


@dataclass(frozen=True)
class RankLine:
    """The state of a rank. `steps_per_s`, `rows_per_s`: None if nothing counts them, or without an older report."""

    rank: int
    host: str
    pid: int
    steps: int | None
    steps_per_s: float | None
    rows_per_s: float | None
    computing: float
    waiting: float
    moving: float
    hidden: float
    rss_bytes: int
    silent_s: float


@dataclass(frozen=True)
class Stall:
    """An operation that some ranks wait for. `waiting`: Ranks that have submitted it. `missing`: The other ranks."""

    name: str
    since_s: float
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Summary:
    """The state of a job."""

    # job, script, size, hosts: The name of the job, its script, its number of ranks, and its hosts.
    job: str
    script: str
    size: int
    hosts: tuple[str, ...]
    age_s: float  # Seconds since the start of the job.
    silent_s: float  # Seconds since the status file was written; 0 if less than _SILENT_S.
    steps_per_s: float | None  # Steps of the job; all ranks together make one step.
    rows_per_s: float | None  # Rows of all ranks together.
    communication: float  # The share of the last interval in which ranks waited for collectives, on average.
    hidden: float  # The share in which they waited during the backward pass, on average.
    slowest: int | None  # The rank that the others wait for; None if there is none.
    why: str  # The cause of the slowness, or why there is no slowest rank.
    ranks: tuple[RankLine, ...]  # The state of each rank.
    stalls: tuple[Stall, ...]  # The operations that ranks have waited for long.


def summarize(now: JobStatus, before: JobStatus | None, time_s: float) -> Summary:
    """Summarize a job. `before`: An older status, to compute speeds; may be None. `time_s`: Now, since 1970."""
    earlier = {rank.rank: rank for rank in before.ranks} if before is not None and before.started == now.started else {}
    lines = tuple(_line(rank, earlier.get(rank.rank), now.written) for rank in now.ranks)
    last, why = _slowest(now.ranks)
    steps = [line.steps_per_s for line in lines if line.steps_per_s is not None]
    rows = [line.rows_per_s for line in lines]
    return Summary(
        now.job, now.script, now.size, tuple(dict.fromkeys(rank.host for rank in now.ranks)), time_s - now.started,
        _silence(time_s - now.written), max(steps, default=None),
        sum(each for each in rows if each is not None) if rows and None not in rows else None,
        fmean(rank.waiting + rank.moving for rank in now.ranks) if now.ranks else 0.0,
        fmean(rank.hidden for rank in now.ranks) if now.ranks else 0.0, last, why, lines, _stalls(now.ranks))


def _line(now: RankStatus, before: RankStatus | None, written: float) -> RankLine:
    def rate(new: int | None, old: int | None) -> float | None:
        seconds = now.written - before.written if before is not None else 0.0
        return (new - old) / seconds if new is not None and old is not None and seconds > 0 else None

    return RankLine(now.rank, now.host, now.pid, now.steps, rate(now.steps, before.steps if before else None),
                    rate(now.rows, before.rows if before else None), now.computing, now.waiting, now.moving,
                    now.hidden, now.rss_bytes, _silence(written - now.written))


def _silence(seconds: float) -> float:
    return seconds if seconds >= _SILENT_S else 0.0


def _slowest(ranks: tuple[RankStatus, ...]) -> tuple[int | None, str]:
    """Return the slowest rank, and why it is slow; or None, and why no rank counts as the slowest."""
    if len(ranks) < 2:
        return None, "the job has only one rank"
    found = slowest([rank.waiting for rank in ranks])
    if found is None:
        share = fmean(rank.waiting for rank in ranks)
        return None, f"each rank waits {share:.0%} of the time" if share >= LEAST_COST else "no rank waits for another"
    place, cost = found
    last, others = ranks[place], [asdict(rank) for rank in ranks if rank is not ranks[place]]
    return last.rank, (f"the others wait {last.waiting + cost:.0%} of the time, and this rank {last.waiting:.0%}. "
                       f"{cause_of([asdict(last)], others, cost)}")


def _stalls(ranks: tuple[RankStatus, ...]) -> tuple[Stall, ...]:
    """Return the operations for which a rank has waited at least _STALLED_S, the oldest first."""
    since: dict[str, dict[int, float]] = {}
    for rank in ranks:
        for each in rank.outstanding:
            since.setdefault(each.name, {})[rank.rank] = each.since_s
    found = [Stall(name, max(waits.values()), tuple(waits), tuple(r.rank for r in ranks if r.rank not in waits))
             for name, waits in since.items() if max(waits.values()) >= _STALLED_S]
    return tuple(sorted(found, key=lambda stall: -stall.since_s))


# -- the display ------------------------------------------------------------------------------------------------------

_MOST_RANKS = 64  # More ranks do not fit on a screen. Only the first ranks get a line.


def _drawn(summaries: Sequence[Summary], problems: Sequence[str], is_list: bool) -> "RenderableType":
    """If `is_list`, draw one line for each job, else draw the only job in detail. Below, draw the `problems`."""
    from rich.console import Group
    from rich.text import Text
    return Group(*(_listed(summaries) if is_list else _job(summaries[0])),
                 *(Text(f"not shown: {problem}", style="yellow") for problem in problems))


def _job(summary: Summary) -> list["RenderableType"]:
    """Draw one job: a summary of all ranks, a line for each rank, and the stalled operations."""
    from rich.table import Table
    from rich.text import Text
    ranks = f"{counted(summary.size, 'rank')} on {counted(len(summary.hosts), 'host')}"
    head = Text(f"{summary.script}  {ranks}, since {_duration(summary.age_s)}  ({summary.job})", style="bold")
    hidden = behind(Waits(1.0, moving=summary.communication, hidden=summary.hidden))
    lines: list[RenderableType] = [head, Text(
        f"{figure(summary.steps_per_s)} steps and {figure(summary.rows_per_s)} rows per second of all ranks; "
        f"communication {summary.communication:.0%} of the time{hidden and f', {hidden}'}")]
    if summary.silent_s:
        lines.append(Text(f"The job has reported nothing for {_duration(summary.silent_s)}. It has ended, or hangs.",
                          style="red"))
    lines.append(Text(f"The slowest is rank {summary.slowest}: {summary.why}" if summary.slowest is not None
                      else f"No rank is slower than the others: {summary.why}."))
    table = Table("rank", "host", "process", "steps", "steps/s", "rows/s", "computes", "waits", "moves", "memory",
                  box=None, header_style="bold", pad_edge=False)
    for line in summary.ranks[:_MOST_RANKS]:
        style = "red" if line.silent_s else "yellow" if line.rank == summary.slowest else ""
        last = f"silent {_duration(line.silent_s)}" if line.silent_s else f"{line.rss_bytes / 2**30:.2f} GB"
        table.add_row(str(line.rank), line.host, str(line.pid), "-" if line.steps is None else str(line.steps),
                      figure(line.steps_per_s), figure(line.rows_per_s), f"{line.computing:.0%}",
                      f"{line.waiting:.0%}", f"{line.moving:.0%}", last, style=style)
    lines.append(table)
    if len(summary.ranks) > _MOST_RANKS:
        lines.append(Text(f"and {len(summary.ranks) - _MOST_RANKS} more ranks (--json prints all)"))
    lines += [Text(f"{stall.name} has been incomplete for {_duration(stall.since_s)}: ranks {rank_list(stall.waiting)} "
                   f"wait for {f'ranks {rank_list(stall.missing)}' if stall.missing else 'its end'}", style="red")
              for stall in summary.stalls]
    return lines


def _listed(summaries: Sequence[Summary]) -> list["RenderableType"]:
    from rich.table import Table
    from rich.text import Text
    table = Table("job", "script", "ranks", "since", "steps/s", "communication", box=None, header_style="bold",
                  pad_edge=False)
    for each in summaries:
        table.add_row(each.job, each.script, str(each.size), _duration(each.age_s), figure(each.steps_per_s),
                      f"silent {_duration(each.silent_s)}" if each.silent_s else f"{each.communication:.0%}")
    return [table, Text("To show one job, type: mpistrat top JOB, or mpistrat top SCRIPT")]


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


# -- the file for Prometheus ------------------------------------------------------------------------------------------

_LABELS = ("job", "rank", "host")


def _write_metrics(jobs: Sequence[JobStatus], path: Path) -> None:
    """Write metrics for Prometheus, replacing the file atomically. Raises LaunchError: The file cannot be written."""
    from prometheus_client import CollectorRegistry, write_to_textfile
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
    share = GaugeMetricFamily("mpistrat_share", "Share of the last interval: computing, waiting for ranks, moving "
                              "bytes, hidden (waiting or moving in the backward pass).", labels=(*_LABELS, "what"))
    memory = GaugeMetricFamily("mpistrat_rss_bytes", "Memory of the process.", labels=_LABELS)
    written = GaugeMetricFamily("mpistrat_written_seconds", "Time of the last report of the rank.", labels=_LABELS)
    oldest = GaugeMetricFamily("mpistrat_oldest_outstanding_seconds", "The time that the rank has waited for its "
                               "oldest operation; 0 if it waits for none.", labels=_LABELS)
    counters = {name: CounterMetricFamily(f"mpistrat_{name}", text, labels=_LABELS) for name, text in (
        ("steps", "Training steps."), ("rows", "Rows trained on."), ("operations", "Collectives."),
        ("bytes", "Bytes of collectives."))}
    for labels, rank in (([job.job, str(rank.rank), rank.host], rank) for job in jobs for rank in job.ranks):
        for name, counter in counters.items():
            if (value := getattr(rank, name)) is not None:
                counter.add_metric(labels, value)
        for what in ("computing", "waiting", "moving", "hidden"):
            share.add_metric([*labels, what], getattr(rank, what))
        memory.add_metric(labels, rank.rss_bytes)
        written.add_metric(labels, rank.written)
        oldest.add_metric(labels, max((each.since_s for each in rank.outstanding), default=0.0))

    class Jobs(Collector):
        def collect(self) -> "list[Metric]":
            return [*counters.values(), share, memory, written, oldest]

    registry = CollectorRegistry()
    registry.register(Jobs())
    try:
        write_to_textfile(str(path), registry)
    except OSError as error:
        raise LaunchError(f"--prometheus {path}: {error.strerror}. Name a file in a directory to which you may write, "
                          "such as node_exporter's --collector.textfile.directory.") from None


# -- the command ------------------------------------------------------------------------------------------------------

_INTERVAL_S = 1.0
_ONCE_S = 2.2  # Each rank reports once a second, or later if cores are busy. The speed needs two reports.
_EXIT_NO_JOB = 1

_EPILOG = """\
top reads the status file that rank 0 of each job writes once a second into $XDG_RUNTIME_DIR/mpistrat-UID (or
/tmp/mpistrat-UID). So run it on the host of rank 0, as the same user. Nothing listens on a port.

"computes", "waits" and "moves" are shares of the last second. A rank waits from the submission of its gradients to the
submission of the last rank. So the slowest rank waits least. "moves" is the time from this submission to the result.

The exit code is 0; 1 if no such job runs; 2 for wrong input. Ctrl-C ends top.

examples:
  mpistrat top
  mpistrat top --once
  mpistrat top --json | python -m json.tool
  mpistrat top --prometheus /var/lib/node_exporter/mpistrat.prom
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code: _EXIT_NO_JOB if there is no job to show, else 0.

    Raises MissingDependencyError: rich, or prometheus_client for --prometheus, is not installed.
    """
    options = _parser().parse_args(argv)
    if options.prometheus:
        try:
            import prometheus_client  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError(f"--prometheus needs prometheus_client ({pip_extra('top')}).") from error
    found = _look()
    jobs = _chosen(found, options.job)
    if not jobs:
        for problem in found.problems:
            print(f"not shown: {problem}")
        if found.jobs:
            there = ", ".join(f"{job.job} ({job.script})" for job in found.jobs)
            print(f"No job or script has a name that begins with {options.job}. Running jobs: {there}.")
        else:
            print(f"No job of yours runs on this host ({status_directory(os.environ)}). Run mpistrat top on the host "
                  "of rank 0.")
        return _EXIT_NO_JOB
    if options.json or options.once or options.svg or not (options.prometheus or sys.stdout.isatty()):
        time.sleep(_ONCE_S)
        later = _look()
        return _show_once(options, _summaries(_chosen(later, options.job) or jobs, jobs), later)
    return _show(options)


def _look() -> Found:
    return read(status_directory(os.environ), os.getuid(), time.time())


def _show_once(options: argparse.Namespace, summaries: Sequence[Summary], found: Found) -> int:
    if options.prometheus:
        _write_metrics(_chosen(found, options.job), options.prometheus)
    if options.json:
        print(json.dumps({"version": 1, "jobs": [asdict(each) for each in summaries],
                          "problems": found.problems}, indent=1))
        if not options.svg:
            return 0
    console = _console(io.StringIO() if options.json else None)
    console.print(_drawn(summaries, found.problems, len(summaries) != 1))
    if options.svg:
        try:
            # Remove the fonts that the picture would load from the network.
            options.svg.write_text(re.sub(r"@font-face {.*?}", "", console.export_svg(title="mpistrat top"),
                                          flags=re.DOTALL), encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"--svg {options.svg} cannot be written: {error.strerror}") from None
    return 0


def _show(options: argparse.Namespace) -> int:
    """Show the only job, or a list if several jobs run when top starts, until Ctrl-C or until none of them is left."""
    console = _console()
    from rich.live import Live
    first = before = _chosen(_look(), options.job)
    wanted = first[0].job if len(first) == 1 else options.job
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            found = _look()
            jobs = _chosen(found, wanted)
            if options.prometheus:
                _write_metrics(jobs, options.prometheus)
            if not jobs:
                break
            live.update(_drawn(_summaries(jobs, before), found.problems, len(first) != 1), refresh=True)
            before = jobs
            time.sleep(options.interval)
    others = f" Others run: {', '.join(f'{job.job} ({job.script})' for job in found.jobs)}." if found.jobs else ""
    print(f"{first[0].script} has ended ({wanted}).{others}" if len(first) == 1 else f"The jobs have ended.{others}")
    return 0


def _console(file: io.StringIO | None = None) -> "Console":
    """Return a console that prints to `file` (None: stdout) and records its output. Raises MissingDependencyError."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError(f"mpistrat top needs rich ({pip_extra('top')}). Or use --json without rich."
                                     ) from error
    return Console(file=file, record=True)


def _summaries(jobs: Sequence[JobStatus], before: Sequence[JobStatus]) -> list[Summary]:
    earlier = {job.job: job for job in before}
    return [summarize(job, earlier.get(job.job), time.time()) for job in jobs]


def _chosen(found: Found, wanted: str | None) -> list[JobStatus]:
    """Return all jobs if `wanted` is None, else the jobs whose name or script begins with `wanted`."""
    return [job for job in found.jobs if wanted is None
            or any(name.startswith(wanted) for name in (job.job, job.script, os.path.basename(job.script)))]


def _parser() -> Parser:
    parser = Parser("top", "Show what the ranks of a running job do.", _EPILOG)
    parser.add_argument("job", nargs="?", metavar="JOB", help="the name of a job or of its script, or the beginning of "
                        "a name; default: the one job, or a list of jobs")
    parser.add_argument("--once", action="store_true", help="show the job once, after measuring it for two seconds; "
                        "the default if stdout is no terminal")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="show the job once, and save the display as a picture")
    parser.add_argument("--prometheus", type=Path, metavar="FILE", help="also write metrics to a file, at each update, "
                        "for the textfile collector of Prometheus' node_exporter")
    parser.add_argument("--interval", type=positive_seconds, default=_INTERVAL_S, metavar="SECONDS",
                        help=f"seconds between two updates (default {_INTERVAL_S:g})")
    return parser
