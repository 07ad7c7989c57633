"""Command line of `mpistrat run`, taken apart: our own options, mpirun's options, and the command.

Our options and mpirun's may stand in any order before the command. The command begins after `--`, or without `--` at
the first word that is neither an option nor the value of one. Only the arity of mpirun's options makes that decision;
for one that is not in the table below `--` is required.
"""

import argparse
from dataclasses import dataclass
from typing import NoReturn

from ..core.errors import LaunchError
from .hostfile import HostList, parse_list, read_hostfile

# Our options, and how many words follow each.
_OWN_ARITY = {"-np": 1, "-H": 1, "--hostfile": 1, "--mpirun": 1, "--oversubscribe": 0, "--dry-run": 0, "--help": 0}
# Other names for them, which horovodrun and the different mpiruns use.
_ALIASES = {
    "-n": "-np", "--np": "-np", "--num-proc": "-np", "-hosts": "-H", "--hosts": "-H", "-host": "-H", "--host": "-H",
    "-hostfile": "--hostfile", "-f": "--hostfile", "-machinefile": "--hostfile", "--machinefile": "--hostfile",
    "-oversubscribe": "--oversubscribe", "-h": "--help",
}
# How many words follow an option of mpirun, without its dashes (Open MPI takes one dash or two, Hydra too). Only those
# that people use with training jobs.
_MPIRUN_ARITY = {
    **dict.fromkeys(("mca", "prtemca", "pmixmca", "gmca", "env", "genv"), 2),
    **dict.fromkeys((
        "x", "bind-to", "map-by", "rank-by", "wdir", "wd", "timeout", "prefix", "output", "output-filename", "stdin",
        "with-ft", "forward-signals", "display", "tune", "path", "cpu-set", "npernode", "N", "npersocket",
        "personality", "runtime-options", "ppn", "perhost", "iface", "launcher", "launcher-exec", "rmk", "bootstrap",
        "bootstrap-exec", "envlist", "genvlist", "membind", "prepend-pattern", "outfile-pattern", "errfile-pattern",
        "gpus-per-proc", "localhost",
    ), 1),
    **dict.fromkeys((
        "tag-output", "timestamp-output", "merge-stderr-to-stdout", "report-bindings", "display-map",
        "display-allocation", "display-topo", "nolocal", "nooversubscribe", "use-hwthread-cpus", "allow-run-as-root",
        "enable-recovery", "disable-recovery", "verbose", "v", "q", "quiet", "l", "prepend-rank",
        "genvall", "genvnone", "envall", "envnone", "print-all-exitcodes", "disable-auto-cleanup",
    ), 0),
}


@dataclass(frozen=True)
class Words:
    """The words of a command line by whom they are meant for."""

    own: tuple[str, ...]
    mpirun: tuple[str, ...]
    command: tuple[str, ...]


def split(words: list[str]) -> Words:
    """Decide for each word whether it is ours, mpirun's or the command's.

    Raises:
        LaunchError: It cannot be known where the command begins.
    """
    own: list[str] = []
    mpirun: list[str] = []
    i = 0
    while i < len(words) and words[i].startswith("-") and words[i] != "--":
        option, equals, value = words[i].partition("=")
        option = _ALIASES.get(option, option)
        name = option.lstrip("-")
        rest = words[i + 1:]
        if option in _OWN_ARITY:
            # As one word, since argparse takes a value that begins with a dash for an option.
            arity = 0 if equals else _OWN_ARITY[option]
            if arity and not rest:
                raise LaunchError(f"{option} needs a value, for example: mpistrat run -np 2 python train.py")
            own.append(f"{option}={rest[0]}" if arity else f"{option}{equals}{value}")
        elif name in _MPIRUN_ARITY:
            arity = _MPIRUN_ARITY[name]
            if equals and arity == 1:
                # Open MPI's mpirun does not know `--bind-to=none`.
                mpirun += [option, value]
                arity = 0
            else:
                mpirun += [words[i], *rest[:arity]]
        elif equals:
            mpirun.append(words[i])
            arity = 0
        elif "--" in rest:
            # The option is new to us, so its values are all words up to the next option.
            arity = next(n for n, word in enumerate(rest) if word.startswith("-"))
            mpirun += [words[i], *rest[:arity]]
        else:
            raise LaunchError(
                f"{words[i]} is handed to mpirun, but how many values it takes is not known here. Write -- before the "
                f"command: mpistrat run -np 2 {words[i]} ... -- python train.py")
        i += 1 + arity
    if i < len(words) and words[i] == "--":
        i += 1
    return Words(tuple(own), tuple(mpirun), tuple(words[i:]))


class Parser(argparse.ArgumentParser):
    """argparse with errors as LaunchError: one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add what every subcommand that starts ranks has in common: np, hosts, hostfile, mpirun, oversubscribe."""
    parser.add_argument("-np", dest="np", type=_ranks, metavar="N", help="number of ranks (processes)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", action="append", metavar="HOST:SLOTS,...",
                       help="hosts and how many ranks each takes; without it all ranks run here, or in the allocation "
                       "of the batch system")
    where.add_argument("--hostfile", metavar="FILE",
                       help="a file of hosts, as Open MPI ('node1 slots=4') or MPICH ('node1:4') writes them")
    parser.add_argument("--oversubscribe", action="store_true",
                        help="allow more ranks than the hosts have slots")
    parser.add_argument("--mpirun", metavar="PATH",
                        help="the mpirun to use; default: the one of this Python environment, then of the PATH")


def read_hosts(options: argparse.Namespace) -> HostList | None:
    """The hosts that the options of `add_launch_options` name, if any.

    Raises:
        LaunchError: As parse_list and read_hostfile.
    """
    if options.hosts is not None:
        return parse_list(",".join(options.hosts))
    return read_hostfile(options.hostfile) if options.hostfile is not None else None


def _ranks(text: str) -> int:
    try:
        ranks = int(text)
    except ValueError:
        ranks = 0
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of ranks; write for example: -np 2")
    return ranks
