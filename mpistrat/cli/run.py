"""`mpistrat run`: start a command on several ranks with mpirun, and make the job end as a whole. Called by main.py."""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..core.errors import LaunchError
from ..core.install import numbers
from ..process.launch_env import RUN_CORES, launched_size
from ..process.launchers import STARTED
from . import as_horovod, efficiency, elastic_run, horovodrun
from .arguments import AUTO, Parser, add_launch_options, mpirun_options, read_hosts, seconds, split_arguments
from .automatic import automatic
from .inventory import has_nvidia_driver
from .main import main as mpistrat_command
from .mpirun import (
    Job,
    LaunchCommand,
    Machine,
    Mpirun,
    check_count,
    compose,
    find_mpirun,
    has_first_rank,
    identify,
    is_local,
    sets_binding,
    this_machine,
    with_home,
)
from .rank_shell import in_shell, own_stdin
from .script import EXAMPLE, checked, other_python, with_text
from .ssh import hosts_by_ssh, unreachable
from .startup import is_python, variables
from .stderr.output import Output
from .supervisor import Interference, Outcome, Start, launch
from .termination import TimeLimits

_START_TIMEOUT_S = 30.0
_GRACE_S = 25.0  # Slurm and Kubernetes give a job 30 s, in which mpirun has to end, too.
# Options of mpirun with which the output of ranks goes to files, or to its stdout; --output has its own words for it.
_OUTPUT_OPTIONS = ("outfile-pattern", "errfile-pattern", "merge-stderr-to-stdout")

_EPILOG = """\
The command begins after --, or at the first argument that is neither an option nor the value of an option. A file that
ends in .py is run with the Python that runs mpistrat. Options that are not listed here are passed to mpirun. After an
option that mpistrat does not know, write -- before the command.

mpistrat adds the options that root, hosts and oversubscription need, and forwards these variables to all hosts:
MPISTRAT_*, NCCL_*, PATH, PYTHONPATH, LD_LIBRARY_PATH, VIRTUAL_ENV, KERAS_BACKEND, TF_CPP_MIN_LOG_LEVEL. --dry-run
prints the whole command. The ranks of a host get equal shares of its cores (not with MPISTRAT_BIND=gpu), unless
options of mpirun bind them.

The last lines say why a job has failed: ranks, hosts, the last lines of your code, the message (once for all ranks that
share it), the file with the last operations of the ranks (MPISTRAT_RECORDER=status: none) and the exit code. Of
TensorFlow's log lines only errors are printed, once for all ranks (TF_CPP_MIN_LOG_LEVEL=2, unless it is set).

The exit code is mpirun's: that of the first rank that failed; 2 for wrong input. SIGTERM and Ctrl-C go to the ranks,
which have some time to save; a second signal ends the job at once. The exit code is 143 or 130 then, or 0 if all ranks
have ended well. stdin is that of rank 0. Processes that a failed job leaves on this host are killed. mpirun is
terminated if it does not end within 15 s after a rank has ended the job. --help among the arguments of a Python script
runs the script once, without mpirun.

examples:
  mpistrat run -np 2 python train.py
  mpistrat run -np 8 -H node1:4,node2:4 train.py --epochs 3
  mpistrat run -np 8 --hostfile hosts.txt -x MY_VARIABLE --tag-output -- python train.py
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code of the job.

    Raises LaunchError: The input is wrong, or no mpirun is found.
    """
    options, passed, command = parse(argv)
    if options.check_build:
        return mpistrat_command(["doctor"])
    command = with_text(command, sys.stdin)
    if options.as_horovod is not None:
        print(f"mpistrat run: {as_horovod.first_line()}", file=sys.stderr)
    if options.np is not None and not options.dry_run and asks_for_help(command := checked(command, os.environ)):
        print("mpistrat run: --help among the arguments: the command runs once, without mpirun", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(command[0], command)
    around, _ = launched_size(os.environ)
    if around > 1:
        print(f"mpistrat run: this is one of {around} ranks of another job, which each start a job of their own",
              file=sys.stderr)
    if options.efficiency is not None and not options.dry_run:
        if _goes_elsewhere(passed):
            raise LaunchError("--efficiency reads what the ranks measure from their stderr: leave out the option that "
                              "merges it, or writes it to files")
        return efficiency.run(options, lambda ranks, more: launched(
            plan(argparse.Namespace(**{**vars(options), "np": ranks}), passed, command, os.environ), options, more))
    if options.np is None:
        options.np = options.max_np
    if elastic_run.is_asked_for(options) and not options.dry_run:
        return elastic_run.run(options, lambda wanted, mpirun, tolerant, *how: launched(
            plan(wanted, (*tolerant, *passed), command, os.environ, mpirun), wanted, *how))
    planned = plan(options, passed, command, os.environ)
    if options.dry_run:
        print(planned.composed(os.environ))
        return 0
    if planned.warning:
        print(f"mpistrat run: {planned.warning}", file=sys.stderr)
    return launched(planned, options).code


def launched(planned: "Plan", options: argparse.Namespace, more: Mapping[str, str] | None = None,
             limits: TimeLimits | None = None, interference: Interference | None = None) -> Outcome:
    """Run the planned job and return how it has ended. On the main thread, see supervisor.launch.

    Args:
        planned, options: What `plan` and `parse` return.
        more: Variables for mpirun and the ranks.
        limits, interference: See supervisor.launch.
    """
    job, is_here = planned.job, is_local(planned.job, planned.machine)
    environ = {**with_home(os.environ), **(more or {}), **_binding(job, planned.mpirun)}
    if not options.all_output:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not _goes_elsewhere(job.options):  # What a rank says why it fails would not reach the summary.
        own = variables(planned.command, is_here, {**os.environ, **planned.variables}, options.traceback)
        environ |= own
        both = {name: value for name, value in own.items() if name in planned.variables}
        planned = replace(planned, variables={**planned.variables, **both})

    def why_not() -> str:
        if not planned.others:
            return ""
        needed = [planned.mpirun.path, *(word for word in planned.command[:1] if os.path.isabs(word))]
        try:
            found = unreachable(planned.others, {**environ, **planned.variables}, needed)
        except OSError as error:
            return f"ssh cannot be tried: {error}"
        return next(map(" ".join, found.values()), "")

    timeout_s = math.inf if is_here else options.start_timeout or _START_TIMEOUT_S
    start = Start(job.ranks, timeout_s, why_not, 1 if job.hosts is None else len(job.hosts.hosts)) \
        if planned.is_announced else None
    level = environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    output = Output(options.all_output, int(level) if level.isdecimal() else 0, not is_here or has_nvidia_driver())
    limits = limits or TimeLimits(grace_s=_grace_s(planned.mpirun, options.grace_period))
    def why_no_init() -> str:
        return other_python(planned.command[0], os.environ) if is_python(planned.command) else ""

    return launch(planned.composed(environ), environ, limits=limits, output=output, start=start,
                  interference=interference, ranks=job.ranks, why_no_init=why_no_init)


@dataclass(frozen=True)
class Plan:
    """A job that mpirun is to start."""

    command: tuple[str, ...]  # What the user wants to run.
    job: Job  # The job, with what runs in place of `command`.
    # mpirun, machine: What starts it, and where.
    mpirun: Mpirun
    machine: Machine
    variables: dict[str, str]  # Set by options, for mpirun and the ranks.
    others: list[str]  # The hosts where mpirun starts ranks by ssh.
    is_announced: bool  # Whether ranks say that they start.
    warning: str  # On the number of ranks; or "".

    def composed(self, environ: Mapping[str, str]) -> LaunchCommand:
        """The command that starts the job. `environ` is the environment of mpirun."""
        return compose(self.job, self.mpirun, self.machine, environ, self.variables)


def parse(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...], tuple[str, ...]]:
    """Return the options of mpistrat, those of mpirun, and the command. Raises LaunchError."""
    arguments = split_arguments(argv)
    options = _parser().parse_args(arguments.own)
    if options.np == AUTO:
        options.np, said = automatic(read_hosts(options), this_machine(os.environ), os.environ)
        print(f"mpistrat run: -np auto is {said}", file=sys.stderr)
    return options, (*arguments.mpirun, *mpirun_options(options.mpi_args)), arguments.command


def plan(options: argparse.Namespace, passed: tuple[str, ...], command: tuple[str, ...],
         environ: Mapping[str, str], mpirun: Mpirun | None = None) -> Plan:
    """Decide how the job is started, given what `parse` returns, and the mpirun if it is known already.

    Raises LaunchError: The input is wrong, or no mpirun is found.
    """
    if options.np is None:
        raise LaunchError(f"how many ranks? Say it with -np, for example: {EXAMPLE}")
    command, hosts = checked(command, environ), read_hosts(options)
    if options.start_timeout is not None and not options.start_timeout > 0:  # NaN is not either.
        raise LaunchError(f"--start-timeout {options.start_timeout:g} is not a number of seconds above 0")
    mpirun, machine = mpirun or identify(find_mpirun(options.mpirun, environ)), this_machine(environ)
    # A command that is printed is run without `mpistrat run`, which would read the lines that ranks start.
    are_read = not options.dry_run and not _goes_elsewhere(passed)
    others = hosts_by_ssh(hosts, machine, passed, environ) if are_read else []
    is_announced = are_read and (bool(others) or elastic_run.is_asked_for(options))
    job = Job(options.np, command, hosts, options.oversubscribe, passed)
    own = None if options.dry_run or any(option.lstrip("-") == "stdin" for option in passed) else own_stdin()
    # The rest is for mpirun: a terminal, and what rank 0 reads on another host.
    is_direct = own is not None and (own.is_empty or has_first_rank(job, machine))
    stdin = own if own is not None and is_direct and not (own.is_empty and mpirun.launcher.no_stdin) else None
    job = replace(job, reads_stdin=not is_direct, command=in_shell(
        command, options.np, options.output_filename or None, is_announced, stdin))
    named = {**as_horovod.variables(options.as_horovod, environ), **horovodrun.variables(options, mpirun.launcher)}
    return Plan(command, job, mpirun, machine, named, others, is_announced,
                check_count(job, machine, options.force))


def _grace_s(mpirun: Mpirun, asked: float | None) -> float:
    """Seconds from SIGTERM to the end of the ranks; 0: they do not get it."""
    launcher = mpirun.launcher
    if not launcher.handed_on or numbers(mpirun.version) < list(launcher.hands_on_since):
        return 0.0
    return _GRACE_S if asked is None else asked


def asks_for_help(command: Sequence[str]) -> bool:
    """Return whether a Python program is called for its help: with --help, or with -h that has no value."""
    if not is_python(command):
        return False
    arguments = command[1:command.index("--")] if "--" in command else command[1:]
    return "--help" in arguments or any(word == "-h" and (following is None or following.startswith("-"))
                                        for word, following in zip(arguments, [*arguments[1:], None]))


def _goes_elsewhere(options: Sequence[str]) -> bool:
    """Return whether mpirun writes what ranks print to stderr to files, or to its stdout."""
    words = [word for option, value in pairwise(options) if option.lstrip("-") == "output"
             for word in value.split(",")]
    return any(word.startswith(("dir=", "file=", "merge")) for word in words) or any(
        option.lstrip("-") in _OUTPUT_OPTIONS for option in options)


def _binding(job: Job, mpirun: Mpirun) -> dict[str, str]:
    """Variables by which ranks share the cores of their host, unless mpirun binds them; what the user wrote wins."""
    if sets_binding(job.options):
        return {"MPISTRAT_BIND": "none" if os.environ.get("MPISTRAT_BIND", "").lower() in ("cores", "none") else "gpu"}
    # mpirun itself says that it has bound nothing.
    says_which = any(option.lstrip("-") == "report-bindings" for option in job.options)
    return {} if mpirun.launcher.is_binding else {RUN_CORES: "report" if says_which else "1"}


def _parser() -> Parser:
    makers = ", ".join(launcher.name for launcher in STARTED)
    parser = Parser("run", f"Start a command on several ranks with mpirun ({makers}).", _EPILOG,
                    "mpistrat run -np N [-H HOST:SLOTS,... | --hostfile FILE] [mpirun options] [--] command ...")
    add_launch_options(parser)
    parser.add_argument("--force", action="store_true", help="start more than 100 ranks for each core")
    parser.add_argument("--output-filename", metavar="DIR", type=os.path.expanduser, help="rank R prints into "
                        "DIR/rank.R/stdout and DIR/rank.R/stderr; the last lines, on why a job has failed, are on the "
                        "terminal as always")
    parser.add_argument("--grace-period", type=seconds, metavar="S", help="seconds in which ranks may save, after "
                        "they have got SIGTERM or Ctrl-C, until they are ended "
                        f"(default {_GRACE_S:g}; not for --elastic)")
    elastic_run.add_options(parser)
    as_horovod.add_option(parser)
    horovodrun.add_options(parser)
    parser.add_argument("--efficiency", type=int, metavar="N", help="run the first N steps of the script on one rank "
                        "and on all, say how many times as fast all of them train, and end")
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument("--traceback", action="store_true", help="print the whole traceback of each rank that fails")
    parser.add_argument("--all-output", action="store_true",
                        help="print the log lines of TensorFlow of all ranks, and all messages of mpirun")
    return parser
