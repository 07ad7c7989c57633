"""Parse the command line of `mpistrat run` into mpistrat's options, mpirun's options, and the command.

Options of mpistrat and of mpirun may be mixed, before the command. The command begins after `--`. Without `--` the
command begins at the first argument that is neither an option nor the value of an option. So the parser must know how
many values each option of mpirun takes. An option that is not in the table below needs `--` before the command. Called
by `mpistrat run`, `doctor` and `bench`, and by mpistrat.run.
"""

import argparse
import difflib
import math
import os
import shlex
import threading
from dataclasses import dataclass
from typing import NoReturn

from ..core.errors import LaunchError
from ..process.launchers import STARTED
from . import horovodrun
from .hostfile import HostList, parse_list, read_hostfile

AUTO = 0  # the value of `-np auto` until the number of ranks is determined
# Options of mpistrat, and the number of values of each.
_OWN_ARITY = {"-np": 1, "-H": 1, "--hostfile": 1, "--mpirun": 1, "--oversubscribe": 0, "--force": 0, "--dry-run": 0,
              "--traceback": 0, "--all-output": 0, "--help": 0, "--output-filename": 1, **horovodrun.ARITY,
              "--grace-period": 1, "--elastic": 0, "--restart-failed": 0, "--min-np": 1, "--max-np": 1,
              "--host-discovery-script": 1, "--slots-per-host": 1, "--elastic-timeout": 1, "--reset-limit": 1,
              "--blacklist-cooldown-range": 2, "--elastic-checkpoint": 1, "--elastic-checkpoint-every": 1,
              "--efficiency": 1, "--as-horovod": 0}
_NEAR = 0.85  # least similarity of a misspelled option to the suggested option (cutoff of difflib)
# Other names of mpistrat's options, from horovodrun and the different mpiruns.
_ALIASES = {
    "-n": "-np", "--np": "-np", "--num-proc": "-np", "-hosts": "-H", "--hosts": "-H", "-host": "-H", "--host": "-H",
    "-hostfile": "--hostfile", "-f": "--hostfile", "-machinefile": "--hostfile", "--machinefile": "--hostfile",
    "-oversubscribe": "--oversubscribe", "-h": "--help", "-output-filename": "--output-filename",
    "--min-num-proc": "--min-np", "--max-num-proc": "--max-np",
}
_ALIASES.update(horovodrun.ALIASES)
# Options of all launchers, and the number of values of each option. The launcher is not yet known here.
_MPIRUN_ARITY = {name: arity for launcher in STARTED for name, arity in launcher.options.items()}


@dataclass(frozen=True)
class CommandLine:
    """The three parts of a command line: options of mpistrat, options of mpirun, and the command."""

    own: tuple[str, ...]
    mpirun: tuple[str, ...]
    command: tuple[str, ...]


def split_arguments(arguments: list[str]) -> CommandLine:
    """Assign each argument to mpistrat, to mpirun or to the command.

    Raises LaunchError: An option lacks its value, or the beginning of the command cannot be determined.
    """
    own: list[str] = []
    mpirun: list[str] = []
    i = 0
    while i < len(arguments) and arguments[i].startswith("-") and arguments[i] != "--":
        option, equals, value = arguments[i].partition("=")
        option = _ALIASES.get(option, option)
        horovodrun.refuse(option)
        name = option.lstrip("-")
        rest = arguments[i + 1:]
        if option in _OWN_ARITY:
            # As one argument, because argparse takes a separate value that begins with a dash for an option.
            arity = 0 if equals else _OWN_ARITY[option]
            if len(rest) < arity:
                raise LaunchError(f"{option} needs a value, for example: mpistrat run -np 2 python train.py")
            own.append(f"{option}={' '.join(rest[:arity])}" if arity else f"{option}{equals}{value}")
        elif name in _MPIRUN_ARITY:
            arity = 0 if equals else _MPIRUN_ARITY[name]
            if equals and _MPIRUN_ARITY[name] == 1:
                # Open MPI's mpirun does not accept `--bind-to=none`.
                mpirun += [option, value]
            else:
                mpirun += [arguments[i], *rest[:arity]]
        elif near := difflib.get_close_matches(option, [] if "--" in rest else _OWN_ARITY, 1, _NEAR):
            raise LaunchError(f"{option} is no option of mpistrat run. Did you mean {near[0]}? If mpirun has this "
                              "option, write -- before the program (python ...).")
        elif equals:
            mpirun.append(arguments[i])
            arity = 0
        elif "--" in rest:
            # For an option that is not in the table, the values are all arguments up to the next option.
            arity = next(n for n, argument in enumerate(rest) if argument.startswith("-"))
            mpirun += [arguments[i], *rest[:arity]]
        else:
            raise LaunchError(
                f"{arguments[i]} is no option of mpistrat run. If mpirun has this option, write -- before the program: "
                f"mpistrat run -np 2 {arguments[i]} ... -- python train.py")
        i += 1 + arity
    if i < len(arguments) and arguments[i] == "--":
        i += 1
    return CommandLine(tuple(own), tuple(mpirun), tuple(arguments[i:]))


def mpirun_options(text: str) -> tuple[str, ...]:
    """Split a text such as the value of --mpi-args into options of mpirun.

    Raises LaunchError: The text cannot be split, or contains an option of mpistrat or a command.
    """
    try:
        parts = split_arguments([*shlex.split(text), "--"])
    except ValueError as error:  # LaunchError is a subclass.
        raise LaunchError(f"{text!r} is not a list of options for mpirun: {error}") from None
    wrong = " ".join((*parts.own, *parts.command))
    if wrong:
        raise LaunchError(f"{text!r} is not a list of options for mpirun: mpirun has no option {wrong}, or "
                          "mpistrat run itself takes the option.")
    return parts.mpirun


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand. Wrong arguments raise LaunchError, so the user sees one line without the usage."""

    def __init__(self, command: str, description: str, epilog: str, usage: str | None = None):
        super().__init__(f"mpistrat {command}", usage, description, epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all subcommands that start ranks: -np, -H, --hostfile, --oversubscribe, --mpirun."""
    parser.add_argument("-np", dest="np", type=_ranks, metavar="N", help="number of ranks (processes). "
                        "auto: one per slot of -H or the hostfile, else one per GPU, or per two cores, of this host")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", action="append", metavar="HOST:SLOTS,...",
                       help="hosts, with the number of ranks for each; default: all ranks on this host, or in the "
                       "allocation of the batch system")
    where.add_argument("--hostfile", metavar="FILE",
                       help="a file of hosts, in the syntax of Open MPI ('node1 slots=4') or MPICH ('node1:4')")
    parser.add_argument("--oversubscribe", action="store_true",
                        help="allow more ranks than the hosts have slots")
    parser.add_argument("--mpirun", metavar="PATH", type=os.path.expanduser,
                        help="the mpirun to use; default: the one of this Python environment, or the first on the PATH")


def read_hosts(options: argparse.Namespace) -> HostList | None:
    """Return the hosts that were given with -H or --hostfile; None if neither was given.

    Raises LaunchError: See parse_list and read_hostfile.
    """
    if options.hosts is not None:
        return parse_list(",".join(options.hosts))
    return read_hostfile(options.hostfile) if options.hostfile is not None else None


def positive_int(text: str, problem: str) -> int:
    """Convert `text` to a whole number of at least 1. Raises ArgumentTypeError with the text `problem` if it cannot."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(problem)
    return number


def positive_seconds(text: str) -> float:
    """Convert `text` to seconds, above 0 and at most threading.TIMEOUT_MAX. Raises ArgumentTypeError if it cannot."""
    if not 0 < (number := _number(text)) <= threading.TIMEOUT_MAX:  # This also refuses NaN.
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def seconds(text: str) -> float:
    """Convert `text` to seconds, 0 to threading.TIMEOUT_MAX. Raises ArgumentTypeError if it cannot."""
    if not 0 <= (number := _number(text)) <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds of at least 0")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def counted(count: int, noun: str) -> str:
    """Return a number and its noun as text: "1 host", "2 hosts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ranks(text: str) -> int:
    return AUTO if text == "auto" else positive_int(text, f"{text} is not a number of ranks; write for example: -np 2")
