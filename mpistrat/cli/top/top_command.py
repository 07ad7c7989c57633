"""`mpistrat top`: show a running job, and update the display. Called by main.py."""

import argparse
import dataclasses
import io
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import LaunchError, MissingDependencyError
from ...core.install import pip_extra
from ...trace.reports import status_directory
from ..arguments import Parser, positive_seconds
from . import prometheus
from .rates import Summary, summarize
from .status_files import Found, JobStatus, read

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_INTERVAL_S = 1.0
_ONCE_S = 2.2  # Each rank reports once a second, or later if cores are busy. The speed needs two reports.
EXIT_NO_JOB = 1

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
    """Run the subcommand and return the exit code: EXIT_NO_JOB if there is no job to show, else 0.

    Raises:
        LaunchError: The input is wrong.
        MissingDependencyError: rich, or prometheus_client for --prometheus, is not installed.
    """
    options = _parser().parse_args(argv)
    if options.prometheus:
        prometheus.require()
    directory, uid = status_directory(os.environ), os.getuid()
    found = read(directory, uid, time.time())
    jobs = _chosen(found, options.job)
    if not jobs:
        for problem in found.problems:
            print(f"not shown: {problem}")
        if found.jobs:
            there = ", ".join(f"{job.job} ({job.script})" for job in found.jobs)
            print(f"The name of no job or script begins with {options.job}. Running jobs: {there}.")
        else:
            print(f"No job of yours runs on this host ({directory}). Run mpistrat top on the host of rank 0.")
        return EXIT_NO_JOB
    if options.json or options.once or options.svg:
        time.sleep(_ONCE_S)
        later = read(directory, uid, time.time())
        return _show_once(options, _summaries(_chosen(later, options.job) or jobs, jobs), later)
    return _show(lambda: read(directory, uid, time.time()), options)


def _show_once(options: argparse.Namespace, summaries: Sequence[Summary], found: Found) -> int:
    if options.prometheus:
        prometheus.write(_chosen(found, options.job), options.prometheus)
    if options.json:
        print(json.dumps({"version": 1, "jobs": [dataclasses.asdict(each) for each in summaries],
                          "problems": found.problems}, indent=1))
        if not options.svg:
            return 0
    console, draw = _rich(io.StringIO() if options.json else None)
    console.print(draw(summaries, found.problems, len(summaries) != 1))
    if options.svg:
        try:
            # Remove the fonts that the picture would load from the network.
            options.svg.write_text(re.sub(r"@font-face {.*?}", "", console.export_svg(title="mpistrat top"),
                                          flags=re.DOTALL), encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"--svg {options.svg} cannot be written: {error.strerror}") from None
    return 0


def _show(look: Callable[[], Found], options: argparse.Namespace) -> int:
    """Draw the one job that runs at the start, or the list of several jobs, until Ctrl-C or until no job is left."""
    console, draw = _rich()
    from rich.live import Live
    first = before = _chosen(look(), options.job)
    wanted = first[0].job if len(first) == 1 else options.job
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            found = look()
            jobs = _chosen(found, wanted)
            if options.prometheus:
                prometheus.write(jobs, options.prometheus)
            if not jobs:
                break
            live.update(draw(_summaries(jobs, before), found.problems, len(first) != 1), refresh=True)
            before = jobs
            time.sleep(options.interval)
    others = f" Others run: {', '.join(f'{job.job} ({job.script})' for job in found.jobs)}." if found.jobs else ""
    print(f"{first[0].script} has ended ({wanted}).{others}" if len(first) == 1 else f"The jobs have ended.{others}")
    return 0


def _rich(file: io.StringIO | None = None
          ) -> tuple["Console", Callable[[Sequence[Summary], Sequence[str], bool], "RenderableType"]]:
    """Return a console that records its output to `file` or stdout, and the function that draws jobs."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise MissingDependencyError(f"mpistrat top needs rich ({pip_extra('top')}). Or use --json without rich."
                                     ) from error
    from .screen import drawn, listed

    def draw(summaries: Sequence[Summary], problems: Sequence[str], is_list: bool) -> "RenderableType":
        return listed(summaries, problems) if is_list else drawn(summaries[0], problems)

    return Console(file=file, record=True), draw


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
    parser.add_argument("--once", action="store_true", help="show the job once, after measuring it for two seconds")
    parser.add_argument("--json", action="store_true", help="print JSON, once")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="show the job once, and save the display as a picture")
    parser.add_argument("--prometheus", type=Path, metavar="FILE", help="also write metrics to a file, at each update, "
                        "for the textfile collector of Prometheus' node_exporter")
    parser.add_argument("--interval", type=positive_seconds, default=_INTERVAL_S, metavar="SECONDS",
                        help=f"seconds between two updates (default {_INTERVAL_S:g})")
    return parser
