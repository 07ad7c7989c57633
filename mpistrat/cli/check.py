"""`mpistrat check`: print what this machine has and which backends can run; with -np, also run an all-reduce.

Called by main.py.
"""

import argparse
import os
import sys

from ..core.errors import LaunchError
from .arguments import Parser, add_launch_options, read_hosts
from .inventory import Row, backend_rows, gpu_rows, has_nvidia_driver, mpi_rows, nvidia_gpus, software
from .mpirun import Job, LaunchCommand, Mpirun, compose, find_mpirun, identify, this_machine
from .probe import probe
from .ssh import hosts_by_ssh, why_unreachable
from .supervisor import TimeLimits, launch
from .text import counted

DEFAULT_TIMEOUT_S = 120.0

_EPILOG = """\
The exit code is 0 if this machine can train, alone or over MPI (and the all-reduce of -np gave the right result);
1 if it cannot; 2 for wrong input.

examples:
  mpistrat check
  mpistrat check -np 2
  mpistrat check -np 4 -H node1:2,node2:2
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code: 0 if the machine can train, else 1.

    Raises:
        LaunchError: The input is wrong.
    """
    options = _parser().parse_args(argv)
    if options.np is None and (options.hosts or options.hostfile):
        raise LaunchError("hosts are for the all-reduce: say how many ranks, for example: mpistrat check -np 2")
    hosts = read_hosts(options)
    mpirun, mpirun_error = _find_mpirun(options.mpirun)
    command, machine = None, this_machine(os.environ)
    others = hosts_by_ssh(hosts, machine, (), os.environ)
    if options.np is not None and mpirun is not None:
        job = Job(options.np, _selftest(options.np), hosts, options.oversubscribe)
        command = compose(job, mpirun, machine, os.environ)
    found, has_driver = probe(), has_nvidia_driver()
    rows = [*software(), *mpi_rows(found, mpirun, mpirun_error), *gpu_rows(found, nvidia_gpus(os.environ), has_driver)]
    backends = backend_rows(found, has_driver)
    print(table("This machine", rows))
    print(table("Backends", backends))
    missing = [row.label for row in rows if row.needed and not row.is_available]
    if missing:
        print(f"This machine cannot train: see {', '.join(missing)} above.")
    elif not any(row.is_available for row in backends):
        print("This machine cannot train: no backend can run.")
        missing = ["backend"]
    failure = ""
    if options.np is not None:
        print(f"All-reduce over {counted(options.np, 'rank')}")
        failure = (mpirun_error if command is None else (why_unreachable(others, os.environ) if others else "")
                   or _run(command, options.timeout))
        if failure:
            print(f"  failed: {failure}")
    return 1 if missing or failure else 0


def table(title: str, rows: list[Row]) -> str:
    """Format the rows as text with aligned labels, followed by an empty line."""
    width = max((len(row.label) for row in rows), default=0)
    return "\n".join([title, *(f"  {row.label:<{width}}  {row.text}" for row in rows), ""])


def _parser() -> Parser:
    parser = Parser(prog="mpistrat check", description="Show what this machine has and lacks for training over MPI.",
                    epilog=_EPILOG, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_launch_options(parser)
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="SECONDS",
                        help=f"limit for the all-reduce (default {DEFAULT_TIMEOUT_S:g})")
    return parser


def _selftest(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "mpistrat.cli.selftest", str(ranks))


def _find_mpirun(wanted: str | None) -> tuple[Mpirun | None, str]:
    try:
        return identify(find_mpirun(wanted, os.environ)), ""
    except LaunchError as error:
        return None, str(error)


def _run(command: LaunchCommand, timeout_s: float) -> str:
    """Run the command. Returns "" if its exit code is 0, else what went wrong."""
    outcome = launch(command, os.environ, TimeLimits(total_s=timeout_s), speaker="mpistrat check")
    return f"{outcome.why or f'exit code {outcome.code}'}. The line was: {command}" if outcome.code else ""
