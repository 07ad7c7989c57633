"""Parse the command line of `mpistrat run` into mpistrat's options, mpirun's options, and the command.

Options of mpistrat and of mpirun may be mixed, before the command. The command begins after `--`. Without `--` it
begins at the first argument that is neither an option nor the value of one. To find it, the number of values of each
mpirun option must be known; an option that is not in the table below needs `--` before the command. Called by `mpistrat
run`, `doctor` and `bench`, and by mpistrat.run.
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

AUTO = 0  # what -np auto is, until the number is known
# Options of mpistrat, and the number of values of each.
_OWN_ARITY = {"-np": 1, "-H": 1, "--hostfile": 1, "--mpirun": 1, "--oversubscribe": 0, "--force": 0, "--dry-run": 0,
              "--traceback": 0, "--all-output": 0, "--help": 0, "--output-filename": 1, **horovodrun.ARITY,
              "--grace-period": 1, "--elastic": 0, "--restart-failed": 0, "--min-np": 1, "--max-np": 1,
              "--host-discovery-script": 1, "--slots-per-host": 1, "--elastic-timeout": 1, "--reset-limit": 1,
              "--blacklist-cooldown-range": 2, "--elastic-checkpoint": 1, "--elastic-checkpoint-every": 1,
              "--efficiency": 1, "--as-horovod": 0}
_NEAR = 0.85  # how like each other an option and its misspelling are, see difflib
# Other names for them, from horovodrun and the different mpiruns.
_ALIASES = {
    "-n": "-np", "--np": "-np", "--num-proc": "-np", "-hosts": "-H", "--hosts": "-H", "-host": "-H", "--host": "-H",
    "-hostfile": "--hostfile", "-f": "--hostfile", "-machinefile": "--hostfile", "--machinefile": "--hostfile",
    "-oversubscribe": "--oversubscribe", "-h": "--help", "-output-filename": "--output-filename",
    "--min-num-proc": "--min-np", "--max-num-proc": "--max-np",
}
_ALIASES.update(horovodrun.ALIASES)
# Options of mpirun, and the number of values of each, whichever launcher it is: it is not known yet.
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
            raise LaunchError(f"{option} is no option. Did you mean {near[0]}? If it is one of mpirun's, write -- "
                              "before the command.")
        elif equals:
            mpirun.append(arguments[i])
            arity = 0
        elif "--" in rest:
            # For an option that is not in the table, the values are all arguments up to the next option.
            arity = next(n for n, argument in enumerate(rest) if argument.startswith("-"))
            mpirun += [arguments[i], *rest[:arity]]
        else:
            raise LaunchError(
                f"{arguments[i]} is no option of mpistrat run. If it is one of mpirun's, write -- before the command: "
                f"mpistrat run -np 2 {arguments[i]} ... -- python train.py")
        i += 1 + arity
    if i < len(arguments) and arguments[i] == "--":
        i += 1
    return CommandLine(tuple(own), tuple(mpirun), tuple(arguments[i:]))


def mpirun_options(text: str) -> tuple[str, ...]:
    """Return the options of mpirun that are given as one text.

    Raises LaunchError: There is something else among them.
    """
    try:
        parts = split_arguments([*shlex.split(text), "--"])
    except ValueError as error:  # LaunchError is one too.
        raise LaunchError(f"{text!r} is not a list of options for mpirun: {error}") from None
    wrong = " ".join((*parts.own, *parts.command))
    if wrong:
        raise LaunchError(f"{text!r} is not a list of options for mpirun: {wrong} is no option of mpirun, or an "
                          "option that mpistrat itself takes.")
    return parts.mpirun


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand. It raises LaunchError, so that an error is one line without the usage."""

    def __init__(self, command: str, description: str, epilog: str, usage: str | None = None):
        super().__init__(f"mpistrat {command}", usage, description, epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all subcommands that start ranks: -np, -H, --hostfile, --oversubscribe, --mpirun."""
    parser.add_argument("-np", dest="np", type=_ranks, metavar="N", help="number of ranks (processes). "
                        "auto: as many as -H or the hostfile say, or one for each GPU of this host, or each two cores")
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

    Raises LaunchError: As parse_list and read_hostfile.
    """
    if options.hosts is not None:
        return parse_list(",".join(options.hosts))
    return read_hostfile(options.hostfile) if options.hostfile is not None else None


def positive_int(text: str, problem: str) -> int:
    """Return the whole number from 1 on that `text` is. Raises ArgumentTypeError with `problem` if it is none."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(problem)
    return number


def positive_seconds(text: str) -> float:
    """Return the number above 0, of seconds that a thread can wait, that `text` is. Raises ArgumentTypeError if not."""
    if not 0 < (number := _number(text)) <= threading.TIMEOUT_MAX:  # NaN is not.
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return number


def seconds(text: str) -> float:
    """As `positive_seconds`, or 0."""
    if not 0 <= (number := _number(text)) <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0 on")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 host", "2 hosts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _ranks(text: str) -> int:
    return AUTO if text == "auto" else positive_int(text, f"{text} is not a number of ranks; write for example: -np 2")
