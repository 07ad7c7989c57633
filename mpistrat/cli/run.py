"""`mpistrat run`: start a command on several ranks with mpirun, and end the whole job if a rank fails."""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ..core.errors import LaunchError
from ..core.install import numbers
from ..core.slowest import Waits, figure, shares_of
from ..process.launch_env import RUN_CORES, RUN_STEPS, launched_size
from ..process.launchers import STARTED
from ..process.step_timer import LEAST_STEPS, StepTimes
from . import arguments, as_horovod, elastic_run
from .inventory import automatic, busy_cores, has_nvidia_driver
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
from .rank_command import EXAMPLE, checked, in_shell, is_python, other_python, own_stdin, report_variables, with_text
from .ssh import hosts_by_ssh, unreachable
from .stderr import Output
from .supervisor import Interference, Outcome, Start, TimeLimits, launch

_START_TIMEOUT_S = 30.0
_GRACE_S = 25.0  # Slurm and Kubernetes kill a job after 30 s, and mpirun must end within that time, too.
# Options of mpirun that send the output of ranks to files, or to stdout. `--output dir=...` does the same.
_OUTPUT_OPTIONS = ("outfile-pattern", "errfile-pattern", "merge-stderr-to-stdout")

_EPILOG = """\
The command begins after --, or at the first argument that is neither an option nor the value of an option. If the
command is a file that ends in .py, the Python of mpistrat runs the file. Options that are not listed here are passed to
mpirun. If mpistrat does not know an option, write -- before the command.

mpistrat adds the mpirun options for root, hosts and oversubscription, and forwards these variables to all hosts:
MPISTRAT_*, NCCL_*, PATH, PYTHONPATH, LD_LIBRARY_PATH, VIRTUAL_ENV, KERAS_BACKEND, TF_CPP_MIN_LOG_LEVEL. --dry-run
prints the whole command. The ranks of a host get equal shares of its cores (not with MPISTRAT_BIND=gpu), unless
options of mpirun bind the ranks.

The last lines say why a job has failed: ranks, hosts, the last lines of your code, the message (once for all ranks with
the same message), the file with the ranks' last operations (none with MPISTRAT_RECORDER=status) and the exit code. Of
TensorFlow's log lines only errors are printed, once for all ranks (TF_CPP_MIN_LOG_LEVEL is 2, unless you set it).

The exit code is the one that mpirun returns, of the first rank that failed; 2 for wrong input. SIGTERM and Ctrl-C go to
the ranks, which have some time to save. The exit code is then 143 or 130, or 0 if all ranks succeed. A second signal
ends the job at once. Rank 0 reads stdin. Processes that a failed job leaves on this host are killed. mpirun is
terminated if it still runs 15 s after a rank has aborted the job. --help among the arguments of a Python script runs
the script once, without mpirun.

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
        print("mpistrat run: --help is among the arguments, so the command runs once, without mpirun", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp(command[0], command)
    around, _ = launched_size(os.environ)
    if around > 1:
        print(f"mpistrat run: this process is one of {around} ranks of another job; each of them starts a new job",
              file=sys.stderr)
    if options.efficiency is not None and not options.dry_run:
        if _goes_elsewhere(passed):
            raise LaunchError("--efficiency reads measurements from the ranks' stderr. Leave out the option that "
                              "merges stderr into stdout, or writes stderr to files.")
        return measure_efficiency(options, lambda ranks, more: launched(
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
    """Run the planned job and return its Outcome. Call this on the main thread, see supervisor.launch.

    `more`: Additional environment variables for mpirun and the ranks.
    """
    job, is_here = planned.job, is_local(planned.job, planned.machine)
    environ = {**with_home(os.environ), **(more or {}), **_binding(job, planned.mpirun), **planned.variables}
    if not options.all_output:
        environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not _goes_elsewhere(job.options):  # With redirected stderr, no report would reach the summary.
        environ |= report_variables(planned.command, is_here, environ, options.traceback)

    def why_not() -> str:
        if not planned.others:
            return ""
        needed = [planned.mpirun.path, *(word for word in planned.command[:1] if os.path.isabs(word))]
        try:
            found = unreachable(planned.others, environ, needed)
        except OSError as error:
            return f"ssh cannot be tried: {error}"
        return next(map(" ".join, found.values()), "")

    def why_no_init() -> str:
        return other_python(planned.command[0], os.environ) if is_python(planned.command) else ""

    timeout_s = math.inf if is_here else options.start_timeout or _START_TIMEOUT_S
    start = Start(job.ranks, timeout_s, why_not, 1 if job.hosts is None else len(job.hosts.hosts)) \
        if planned.is_announced else Start()
    level = environ.get("TF_CPP_MIN_LOG_LEVEL", "")
    output = Output(options.all_output, int(level) if level.isdecimal() else 0, not is_here or has_nvidia_driver())
    if limits is None:
        launcher, version = planned.mpirun.launcher, numbers(planned.mpirun.version)
        is_handing_on = launcher.handed_on and version >= list(launcher.hands_on_since)
        grace_s = _GRACE_S if options.grace_period is None else options.grace_period
        limits = TimeLimits(grace_s=grace_s if is_handing_on else 0.0)
    command = compose(job, planned.mpirun, planned.machine, environ)
    return launch(command, environ, limits=limits, output=output, start=start, interference=interference,
                  ranks=job.ranks, why_no_init=why_no_init)


@dataclass(frozen=True)
class Plan:
    """A job that mpirun is to start."""

    command: tuple[str, ...]  # The command that the user wrote.
    job: Job  # The job, with the shell command that runs `command`.
    # mpirun, machine: The mpirun that starts the job, and this machine.
    mpirun: Mpirun
    machine: Machine
    variables: dict[str, str]  # Set by options, for mpirun and the ranks.
    others: list[str]  # The hosts on which mpirun starts ranks by ssh.
    is_announced: bool  # Whether ranks print that they start.
    warning: str  # A warning about the number of ranks, or "".

    def composed(self, environ: Mapping[str, str]) -> LaunchCommand:
        """Return the command that starts the job. `environ`: the environment of mpirun."""
        return compose(self.job, self.mpirun, self.machine, environ, self.variables)


def parse(argv: list[str]) -> tuple[argparse.Namespace, tuple[str, ...], tuple[str, ...]]:
    """Return the options of mpistrat, the options of mpirun, and the command. Raises LaunchError: wrong arguments."""
    parser = _parser()
    parts = arguments.split_arguments(argv, parser)
    options = parser.parse_args(parts.own)
    if options.np == arguments.AUTO:
        options.np, said = automatic(arguments.read_hosts(options), this_machine(os.environ), os.environ)
        print(f"mpistrat run: -np auto is {said}", file=sys.stderr)
    return options, (*parts.mpirun, *arguments.mpirun_options(options.mpi_args, parser)), parts.command


def plan(options: argparse.Namespace, passed: tuple[str, ...], command: tuple[str, ...],
         environ: Mapping[str, str], mpirun: Mpirun | None = None) -> Plan:
    """Decide how to start the job, given the results of `parse`. `mpirun`: The mpirun to use; None: find one.

    Raises LaunchError: The input is wrong, or no mpirun is found.
    """
    if options.np is None:
        raise LaunchError(f"-np is missing. Write the number of ranks, for example: {EXAMPLE}")
    command, hosts = checked(command, environ), arguments.read_hosts(options)
    if options.start_timeout is not None and not options.start_timeout > 0:  # This also refuses NaN.
        raise LaunchError(f"--start-timeout {options.start_timeout:g} is not a number of seconds above 0")
    mpirun, machine = mpirun or identify(find_mpirun(options.mpirun, environ)), this_machine(environ)
    # A command of --dry-run runs without `mpistrat run`, which would read the lines of ranks that start.
    are_read = not options.dry_run and not _goes_elsewhere(passed)
    others = hosts_by_ssh(hosts, machine, passed, environ) if are_read else []
    is_announced = are_read and (bool(others) or elastic_run.is_asked_for(options))
    job = Job(options.np, command, hosts, options.oversubscribe, passed)
    own = None if options.dry_run or any(option.lstrip("-") == "stdin" for option in passed) else own_stdin()
    # Otherwise mpirun passes stdin on: a terminal, or the stdin of a rank 0 on another host.
    is_direct = own is not None and (own.is_empty or has_first_rank(job, machine))
    stdin = own if own is not None and is_direct and not (own.is_empty and mpirun.launcher.no_stdin) else None
    job = replace(job, reads_stdin=not is_direct, command=in_shell(
        command, options.np, options.output_filename or None, is_announced, stdin))
    named = as_horovod.variables(options.as_horovod, environ) | arguments.horovod_variables(options, mpirun.launcher)
    return Plan(command, job, mpirun, machine, named, others, is_announced, check_count(job, machine, options.force))


def asks_for_help(command: Sequence[str]) -> bool:
    """Whether the command asks a Python program for help: by --help, or by -h unless a value follows."""
    if not is_python(command):
        return False
    arguments = command[1:command.index("--")] if "--" in command else command[1:]
    return "--help" in arguments or any(word == "-h" and (following is None or following.startswith("-"))
                                        for word, following in zip(arguments, [*arguments[1:], None]))


def _goes_elsewhere(options: Sequence[str]) -> bool:
    """Whether options of mpirun send the stderr of ranks to files, or to stdout."""
    words = [word for option, value in pairwise(options) if option.lstrip("-") == "output" for word in value.split(",")]
    return any(word.startswith(("dir=", "file=", "merge")) for word in words) or any(
        option.lstrip("-") in _OUTPUT_OPTIONS for option in options)


def _binding(job: Job, mpirun: Mpirun) -> dict[str, str]:
    """Return variables that make ranks bind themselves to shares of the cores, or not if mpirun binds them."""
    if sets_binding(job.options):
        return {"MPISTRAT_BIND": "none" if os.environ.get("MPISTRAT_BIND", "").lower() in ("cores", "none") else "gpu"}
    # With --report-bindings, mpirun itself prints that it has bound nothing.
    says_which = any(option.lstrip("-") == "report-bindings" for option in job.options)
    return {} if mpirun.launcher.is_binding else {RUN_CORES: "report" if says_which else "1"}


def _parser() -> arguments.Parser:
    makers = ", ".join(launcher.name for launcher in STARTED)
    parser = arguments.Parser("run", f"Start a command on several ranks with mpirun ({makers}).", _EPILOG, "mpistrat "
                              "run -np N [-H HOST:SLOTS,... | --hostfile FILE] [mpirun options] [--] command ...")
    arguments.add_launch_options(parser)
    parser.add_argument("--force", action="store_true", help="start more than 100 ranks for each core")
    parser.add_argument("--output-filename", metavar="DIR", type=os.path.expanduser, help="write the output of "
                        "rank R to DIR/rank.R/stdout and DIR/rank.R/stderr; the last lines, on why a job has failed, "
                        "still go to the terminal")
    parser.add_argument("--grace-period", type=arguments.seconds, metavar="S", help="seconds that the ranks have to "
                        f"save and to end after SIGTERM or Ctrl-C (default {_GRACE_S:g}; not for --elastic)")
    elastic_run.add_options(parser)
    as_horovod.add_option(parser)
    arguments.add_horovod_options(parser)
    parser.add_argument("--efficiency", metavar="N", help="run the first N steps of the script on one rank and on all "
                        "ranks, print how many times as fast all ranks train, and end", type=arguments.number(
                            int, lambda n: n == n, "{} is not a number of steps. Write for example: --efficiency 50"))
    parser.add_argument("--dry-run", action="store_true", help="print the command instead of running it")
    parser.add_argument("--traceback", action="store_true", help="print the whole traceback of each rank that fails")
    parser.add_argument("--all-output", action="store_true",
                        help="print the log lines of TensorFlow of all ranks, and all messages of mpirun")
    return parser


# -- --efficiency: the first steps on one rank and on all ranks, in two jobs ------------------------------------------


@dataclass(frozen=True)
class Speed:
    """The training speed of a job."""

    steps_per_s: float  # All ranks together make one step.
    rows_per_s: float | None  # The sum over all ranks; None if a rank does not know its number of rows.
    is_global: bool  # Whether the batch of a step is global: the same number of rows for any number of ranks.
    shares: str  # The end of the printed sentence, on the time of the collectives.


def measure_efficiency(options: argparse.Namespace, launch_on: Callable[[int, Mapping[str, str]], Outcome]) -> int:
    """Run the script on one rank, then on all ranks. Print both speeds. Return 0, or the exit code of a failed job.

    `launch_on`: Runs a job, given the number of ranks and additional environment variables. The job ends after
    --efficiency steps (process/step_timer.py).

    Raises LaunchError: The options contradict each other, or a job had too few steps.
    """
    steps, ranks = options.efficiency, options.np
    if steps < LEAST_STEPS:
        raise LaunchError(f"--efficiency {steps}: at least {LEAST_STEPS} steps are needed, because the first two are "
                          "not timed. Write 50 or more, for example: --efficiency 50")
    if ranks is None or ranks < 2:
        raise LaunchError("--efficiency compares one rank with several. Write the number of ranks, for example: -np 2")
    if elastic_run.is_asked_for(options):
        raise LaunchError("--efficiency and --elastic cannot be combined. Leave out one of them.")
    if busy := busy_cores(os.getloadavg()[1], this_machine(os.environ).cores):
        print(f"mpistrat run: on this host {busy}. So the speeds of one rank and of all ranks are not reliable. To see "
              "these processes, type: ps aux --sort=-%cpu | head", file=sys.stderr)
    speeds = {}
    for number in (1, ranks):
        on = arguments.counted(number, "rank")
        print(f"mpistrat run: the first {steps} steps on {on}", file=sys.stderr, flush=True)
        outcome = launch_on(number, {RUN_STEPS: str(steps)})
        if outcome.code:
            return outcome.code
        speeds[number] = speed_of({rank: StepTimes(**json.loads(text)) for rank, text in outcome.measured.items()},
                                  number, steps)
    print(sentence(speeds[1], speeds[ranks], ranks), flush=True)
    return 0


def speed_of(measured: Mapping[int, StepTimes], ranks: int, wanted: int) -> Speed:
    """Return the speed of a job, given the times by rank. Raises LaunchError: A rank made fewer than `wanted` steps."""
    times = list(measured.values())
    few = min((each.counted for each in times if not each.steps), default=0 if len(times) < ranks else None)
    if few is not None:
        what = f"{arguments.counted(few, 'step')}" if few else "a step that averages gradients"
        remedy = f"Ask for fewer than {few} steps, or train for more epochs." if few >= LEAST_STEPS else \
            "Steps are counted in fit, and where a DistributedOptimizer, a DistributedGradientTape or an optimizer " \
            "under MPIStrategy averages gradients."
        raise LaunchError(f"the script ended {'after' if few else 'without'} {what}, but --efficiency should time "
                          f"{wanted} steps. {remedy}")
    longest_s = max(each.seconds for each in times)
    rows = [each.rows for each in times if each.rows is not None]
    return Speed(times[0].steps / longest_s, sum(rows) / longest_s if len(rows) == len(times) else None,
                 times[0].is_global, shares_of([Waits(*each.waits) for each in times], [f"rank {r}" for r in measured]))


def sentence(one: Speed, all_ranks: Speed, ranks: int) -> str:
    """Return a sentence that compares the speeds of one rank and of all ranks: in rows if known, else in steps."""
    if one.rows_per_s is not None and all_ranks.rows_per_s is not None:
        times = all_ranks.rows_per_s / one.rows_per_s
        detail = f"{figure(all_ranks.rows_per_s)} rows per second, and {figure(one.rows_per_s)} on one rank"
    else:
        times = all_ranks.steps_per_s / one.steps_per_s * (1 if all_ranks.is_global else ranks)
        assumed = "" if all_ranks.is_global else ", if each rank's batch is as large as that of the one rank"
        detail = f"{figure(all_ranks.steps_per_s)} steps per second, and {figure(one.steps_per_s)} on one rank{assumed}"
    return f"{ranks} ranks train {times:.3g} times as fast as one, an efficiency of {times / ranks:.0%}: {detail}" \
           f"{all_ranks.shares}."
