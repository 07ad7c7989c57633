"""Parse the command line of `mpistrat run`: mpistrat's options, mpirun's options, the command, and the hosts.

Options of mpistrat, of horovodrun and of mpirun may be mixed, but must stand before the command. The command begins
after `--`. Without `--` the command begins at the first argument that is neither an option nor the value of an option.
Therefore the parser must know how many values each option of mpirun takes. An option that the parser does not know
needs `--` before the command, unless the option is written as `--name=value`.
"""

import argparse
import codecs
import difflib
import math
import os
import re
import shlex
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..core.errors import LaunchError
from ..process.launchers import STARTED, Launcher

# -- hosts ------------------------------------------------------------------------------------------------------------

# In a hostfile, Open MPI has `node1 slots=4` and MPICH has `node1:4`. Both accept an option `node1:4,node2:4`. The
# syntaxes are in the table of launchers (process/launchers.py).
_NAME = re.compile(r"(?:[\w.-]+@)?\w[\w.-]*", re.ASCII)
_READERS = frozenset(launcher for launcher in STARTED if launcher.hostfile)


@dataclass(frozen=True)
class Host:
    """One entry of a host list."""

    name: str  # The name of the host, possibly with a user (`user@host`).
    # Number of ranks. None: a hostfile has no number, which means the number of cores (Open MPI) or 1 (MPICH).
    slots: int | None
    readers: frozenset[Launcher] = _READERS  # The launchers that accept the line unchanged.
    extras: tuple[str, ...] = ()  # Other entries of the line, such as `key=value`.
    where: str = "-H"  # File and line number, for error messages.


@dataclass(frozen=True)
class HostList:
    """The hosts of a job. `path`: The hostfile; "" without one, or for a file from Windows, which mpirun misreads."""

    hosts: tuple[Host, ...]
    path: str = ""

    @property
    def slots(self) -> int | None:
        """The number of slots of all hosts together; None if the number of slots of a host is not known."""
        counts = [host.slots for host in self.hosts]
        return None if None in counts else sum(count for count in counts if count is not None)

    def __str__(self) -> str:
        return ", ".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in self.hosts)


def parse_list(text: str) -> HostList:
    """Parse a list such as `node1:4,node2`. `node2` gets one rank, as with mpirun. Raises LaunchError: wrong syntax."""
    hosts = []
    for entry in text.split(","):
        name, colon, slots = entry.strip().partition(":")
        if not _NAME.fullmatch(name) or (colon and not _is_count(slots)):
            raise LaunchError(f"-H {text}: {entry.strip()!r} is not host:slots. Write for example: -H node1:4,node2:4")
        hosts.append(Host(name, int(slots) if colon else 1))
    return HostList(tuple(hosts))


def read_hostfile(path: str) -> HostList:
    """Read a hostfile in the syntax of Open MPI or of MPICH. Raises LaunchError: The file or a line is wrong."""
    try:
        path = os.path.expanduser(path)
        content = Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}. Give a file with lines like: node1 slots=4") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile {path} is not a text file. Write lines like: node1 slots=4") from None
    hosts = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1)
             if line.split("#")[0].strip()]
    if not hosts:
        raise LaunchError(f"--hostfile {path} contains no host. Write lines like: node1 slots=4")
    # mpirun takes a byte order mark or carriage return of Windows for part of a name. So mpirun gets a list.
    is_of_windows = content.startswith(codecs.BOM_UTF8) or b"\r" in content
    return HostList(tuple(hosts), "" if is_of_windows else path)


def _parse_line(line: str, where: str) -> Host:
    content, has_comment, _ = line.partition("#")
    first, *entries = re.sub(r"\s*=\s*", "=", content).split()
    name, colon, count = first.partition(":")
    slots = int(count) if colon and _is_count(count) else None
    # MPICH's mpirun reads "#" and "@" as parts of the name.
    readers = {each for each in _READERS if (each.has_colons or not colon)
               and (each.has_comments or not (has_comment or "@" in name))}
    extras = []
    wrong = not _NAME.fullmatch(name) or (colon and slots is None)
    for entry in entries:
        key, _, value = entry.partition("=")
        counting = {each for each in _READERS if key in each.slot_keys}
        if counting and _is_count(value) and slots is None:
            slots = int(value)
            readers &= counting
            continue
        accepting = {each for each in _READERS if key in each.host_keys and value}
        wrong = wrong or not accepting
        readers &= accepting
        extras.append(entry)
    if wrong:
        raise LaunchError(f"{where}: {line.strip()!r} is not a host. Write for example 'node1 slots=4' (Open MPI) or "
                          "'node1:4' (MPICH)")
    return Host(name, slots, frozenset(readers), tuple(extras), where)


def host_options(hosts: HostList, launcher: Launcher) -> tuple[str, ...]:
    """Return the options of mpirun that name the hosts: by a hostfile, or by a list such as `node1:4,node2:4`.

    Raises LaunchError: This mpirun cannot read the hostfile, and a line of it (with a key, or without slots) cannot be
    written as a list. Or the hosts' slots differ, but this mpirun starts the same number of ranks on each host.
    """
    if hosts.path and all(launcher in host.readers for host in hosts.hosts):
        return launcher.hostfile, hosts.path
    slots = [_slots_for(host, launcher) for host in hosts.hosts]
    if not launcher.per_host:
        return launcher.hosts, ",".join(f"{host.name}:{count}" for host, count in zip(hosts.hosts, slots, strict=True))
    if len(set(slots)) > 1:
        equal = ",".join(f"{host.name}:{max(slots)}" for host in hosts.hosts)
        raise LaunchError(f"this mpirun is {launcher.name}'s and starts the same number of ranks on each host. "
                          f"Received: {hosts}. Write for example: -H {equal}")
    return launcher.hosts, ",".join(host.name for host in hosts.hosts), launcher.per_host, str(slots[0])


def _slots_for(host: Host, launcher: Launcher) -> int:
    if host.extras or ("@" in host.name and not launcher.has_comments):
        what = ", ".join(host.extras) or host.name
        raise LaunchError(f"{host.where}: this mpirun is {launcher.name}'s, but the hostfile has other syntax: {what} "
                          f"cannot be translated. Write the file for {launcher.name} (see hostfiles/), or use -H.")
    if host.slots is None and launcher.needs_slots:
        # Open MPI uses the number of cores of the host, which is not known here.
        raise LaunchError(f"{host.where}: this mpirun is {launcher.name}'s and needs the number of ranks of "
                          f"{host.name}. Write for example: {host.name}:4")
    return 1 if host.slots is None else host.slots


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


# -- options of horovodrun --------------------------------------------------------------------------------------------

# The options become environment variables for the ranks, or for mpirun. An option that mpirun has under the same name
# is passed to mpirun. An option that has no meaning here raises LaunchError. The variable for ssh was tested with Open
# MPI 5.0.
_LEVELS = {"trace": "debug", "fatal": "error"}  # Horovod's levels that MPISTRAT_LOG_LEVEL does not have
# Option with a value: (the variable that it sets, the unit of the value, the help text).
_SETTINGS = {
    "--fusion-threshold-mb": ("MPISTRAT_FUSION_THRESHOLD", "MB", "size of a fusion buffer"),
    "--cache-capacity": ("MPISTRAT_CACHE_CAPACITY", "N", "number of requests that ranks cache"),
    "--stall-check-warning-time-seconds": ("MPISTRAT_STALL_CHECK_TIME_SECONDS", "S", "time until a stall is reported"),
    "--stall-check-shutdown-time-seconds": ("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "S",
                                            "time until a stall ends the job"),
    "--num-nccl-streams": ("MPISTRAT_NUM_NCCL_STREAMS", "N", "number of NCCL communicators"),
    "--timeline-filename": ("MPISTRAT_TIMELINE", "FILE", "file for a timeline of all ranks"),
    "--log-level": ("MPISTRAT_LOG_LEVEL", "LEVEL", "least severity of the messages shown")}
# Options without a value that set a variable.
_FLAGS = {"--disable-cache": ("MPISTRAT_CACHE_CAPACITY", "0", "ranks cache no requests"),
          "--timeline-mark-cycles": ("MPISTRAT_TIMELINE_MARK_CYCLES", "1", "mark starts of operations in the timeline"),
          "--no-stall-check": ("MPISTRAT_STALL_CHECK_DISABLE", "1", "wait for other ranks without a time limit")}
_REFUSED = {
    **dict.fromkeys(("--gloo", "--jsrun"), "the ranks use MPI"),
    **dict.fromkeys(("--cycle-time-ms", "--autotune", "--no-autotune", "--autotune-log-file",
                     "--hierarchical-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather",
                     "--no-hierarchical-allgather", "--torus-allreduce", "--no-torus-allreduce", "--thread-affinity",
                     "--mpi-threads-disable"), "there is nothing to tune"),
    "--config-file": "write the options on the command line, or set variables (docs/settings.md)"}
_IGNORED = ("--mpi", "--tcp", "--log-without-timestamp")


def add_horovod_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of horovodrun to the parser of `mpistrat run`."""
    group = parser.add_argument_group("options of horovodrun")
    group.add_argument("--check-build", action="store_true", help="run mpistrat doctor instead")
    for option, (name, unit, text) in _SETTINGS.items():
        group.add_argument(option, dest=name, metavar=unit, help=f"{text}; sets {name}")
    for option, (name, value, text) in _FLAGS.items():
        group.add_argument(option, dest=name, action="store_const", const=value, help=f"{text}; sets {name}={value}")
    group.add_argument("--network-interface", metavar="NAME", help="the network interface of MPI and NCCL on all hosts")
    group.add_argument("--ssh-port", metavar="PORT", help="the port of ssh on the other hosts (Open MPI)")
    group.add_argument("--ssh-identity-file", metavar="FILE", help="the key for ssh (Open MPI)")
    group.add_argument("--mpi-args", default="", metavar="'OPTIONS'", help="more options for mpirun, in one argument")
    group.add_argument("--start-timeout", type=float, metavar="S", help="time limit in seconds for the start of all "
                       "ranks, if mpirun starts ranks by ssh or the job is elastic (default 30)")
    for option in _IGNORED:
        group.add_argument(option, action="store_true", help=argparse.SUPPRESS)


def horovod_variables(options: argparse.Namespace, launcher: Launcher) -> dict[str, str]:
    """Return the environment variables that options of horovodrun set. Raises LaunchError: A value cannot be used."""
    found = {name: value for name, *_ in (*_SETTINGS.values(), *_FLAGS.values())
             if (value := getattr(options, name)) is not None}
    fusion = "MPISTRAT_FUSION_THRESHOLD"
    if fusion in found:
        try:
            found[fusion] = str(int(float(found[fusion]) * 2**20))
        except (ValueError, OverflowError):
            raise LaunchError(f"--fusion-threshold-mb {found[fusion]} is not a number of megabytes. Write for example: "
                              "--fusion-threshold-mb 64") from None
    level = "MPISTRAT_LOG_LEVEL"
    if level in found:
        found[level] = _LEVELS.get(found[level].lower(), found[level].lower())
    if options.network_interface is not None:
        found["NCCL_SOCKET_IFNAME"] = options.network_interface
        if not launcher.interface:
            raise LaunchError(f"the mpirun of {launcher.name} chooses the network interface itself. Leave out "
                              "--network-interface.")
        found[launcher.interface] = options.network_interface
    ssh = [] if options.ssh_port is None else ["-p", options.ssh_port]
    if options.ssh_identity_file is not None:
        ssh += ["-i", options.ssh_identity_file]
    if ssh and not launcher.ssh_arguments:
        raise LaunchError(f"the mpirun of {launcher.name} takes no options for ssh. Write the port (Port) "
                          "and the key (IdentityFile) of the hosts into ~/.ssh/config.")
    if ssh:
        found.update(dict.fromkeys(launcher.ssh_arguments, shlex.join(ssh)))
    return found


# -- the parts of the command line ------------------------------------------------------------------------------------

AUTO = 0  # the value of `-np auto` until the number of ranks is determined
_NEAR = 0.85  # least similarity of a misspelled option to the suggested option (cutoff of difflib)
# Other names of mpistrat's options, from horovodrun and the different mpiruns.
_ALIASES = {
    "-n": "-np", "--np": "-np", "--num-proc": "-np", "-hosts": "-H", "--hosts": "-H", "-host": "-H", "--host": "-H",
    "-hostfile": "--hostfile", "-f": "--hostfile", "-machinefile": "--hostfile", "--machinefile": "--hostfile",
    "-oversubscribe": "--oversubscribe", "-h": "--help", "-output-filename": "--output-filename",
    "--min-num-proc": "--min-np", "--max-num-proc": "--max-np", "-p": "--ssh-port", "-i": "--ssh-identity-file",
    "-cb": "--check-build", "--network-interfaces": "--network-interface"}
# Options of all launchers, and the number of values of each option. The launcher is not yet known here.
_MPIRUN_ARITY = {name: arity for launcher in STARTED for name, arity in launcher.options.items()}


@dataclass(frozen=True)
class CommandLine:
    """The three parts of a command line: options of mpistrat, options of mpirun, and the command."""

    own: tuple[str, ...]
    mpirun: tuple[str, ...]
    command: tuple[str, ...]


def split_arguments(arguments: list[str], parser: argparse.ArgumentParser) -> CommandLine:
    """Assign each argument to mpistrat, to mpirun or to the command. `parser`: The parser of mpistrat's options.

    Raises LaunchError: An option lacks its value or is not supported, or it is not clear where the command begins.
    """
    own: list[str] = []
    mpirun: list[str] = []
    known, i = parser._option_string_actions, 0
    while i < len(arguments) and arguments[i].startswith("-") and arguments[i] != "--":
        option, equals, value = arguments[i].partition("=")
        option = _ALIASES.get(option, option)
        if option in _REFUSED:
            raise LaunchError(f"{option} is an option of horovodrun that mpistrat run does not have: "
                              f"{_REFUSED[option]}. Leave the option out.")
        name = option.lstrip("-")
        rest = arguments[i + 1:]
        if option in known:
            # As one argument, because argparse takes a separate value that begins with a dash for an option.
            arity = 0 if equals or known[option].nargs is not None else len(str(known[option].metavar).split())
            if len(rest) < arity:
                raise LaunchError(f"{option} needs a value, like -np in: mpistrat run -np 2 python train.py")
            own.append(f"{option}={' '.join(rest[:arity])}" if arity else f"{option}{equals}{value}")
        elif name in _MPIRUN_ARITY:
            arity = 0 if equals else _MPIRUN_ARITY[name]
            if equals and _MPIRUN_ARITY[name] == 1:
                # Open MPI's mpirun does not accept `--bind-to=none`.
                mpirun += [option, value]
            else:
                mpirun += [arguments[i], *rest[:arity]]
        elif "--" not in rest and (near := _near(option, [*known, *(f"--{each}" for each in _MPIRUN_ARITY)])):
            raise LaunchError(f"{option} is no option of mpistrat run. Did you mean {near}? If mpirun has this "
                              "option, write -- before the program (python ...).")
        elif equals:
            mpirun.append(arguments[i])
            arity = 0
        elif "--" in rest:
            # For an option that is not in the table, the values are all arguments up to the next option.
            arity = next(n for n, argument in enumerate(rest) if argument.startswith("-"))
            mpirun += [arguments[i], *rest[:arity]]
        else:
            raise LaunchError(f"{option} is no option of mpistrat run. If mpirun has this option, write -- before the "
                              f"program: mpistrat run -np 2 {arguments[i]} ... -- python train.py")
        i += 1 + arity
    if i < len(arguments) and arguments[i] == "--":
        i += 1
    return CommandLine(tuple(own), tuple(mpirun), tuple(arguments[i:]))


def _near(option: str, known: Collection[str]) -> str:
    """Return the option that is misspelled as `option`, or "". Short options are too short for difflib: -pn for -np."""
    swapped = [each for each in known if sorted(each) == sorted(option)]
    return next(iter(swapped or difflib.get_close_matches(option, known, 1, _NEAR)), "")


def mpirun_options(text: str, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Return mpirun's options, given the value of --mpi-args. Raises LaunchError: A word is not an option of mpirun."""
    try:
        parts = split_arguments([*shlex.split(text), "--"], parser)
    except ValueError as error:  # LaunchError is a subclass.
        raise LaunchError(f"{text!r} is not a list of options for mpirun: {error}") from None
    wrong = " ".join((*parts.own, *parts.command))
    if wrong:
        raise LaunchError(f"{text!r} is not a list of options for mpirun: mpirun has no option {wrong}, or "
                          "mpistrat run itself takes the option.")
    return parts.mpirun


def number(kind: type[int] | type[float], is_right: Callable[[float], bool], problem: str) -> Callable[[str], Any]:
    """Return a converter of text to numbers, for argparse. `problem`: The error message, with {} for the text."""
    def convert(text: str) -> float:
        try:
            found = kind(text)
        except ValueError:
            found = math.nan
        if not is_right(found):  # NaN is never right.
            raise argparse.ArgumentTypeError(problem.format(text))
        return found
    return convert


seconds = number(float, lambda n: 0 <= n <= threading.TIMEOUT_MAX, "{} is not a number of seconds, 0 or more")
positive_seconds = number(float, lambda n: 0 < n <= threading.TIMEOUT_MAX, "{} is not a number of seconds above 0")
_ranks = number(int, lambda n: n >= 1, "{} is not a number of ranks; write for example: -np 2")


class Parser(argparse.ArgumentParser):
    """The parser of a subcommand. Wrong arguments raise LaunchError, so the user sees one line and no usage text."""

    def __init__(self, command: str, description: str, epilog: str, usage: str | None = None):
        super().__init__(f"mpistrat {command}", usage, description, epilog, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_args(self, args: Sequence[str]) -> argparse.Namespace:  # type: ignore[override]
        """Parse the arguments of the subcommand, whose options also have their other names (_ALIASES)."""
        words, given, known = [], set(), self._option_string_actions
        for option, equals, value in (word.partition("=") for word in args):
            name = _ALIASES.get(option, option)
            if name not in known and name[0:1] == "-" and (near := _near(name, known)):
                self.error(f"{option} is no option of {self.prog}. Did you mean {near}?")
            if name in given and known[name].nargs is None and name != "-H":
                self.error(f"{name} is given twice. Leave out one of them.")
            given.add(name)
            words.append((name if name in known else option) + equals + value)
        return super().parse_args(words)

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}. See {self.prog} --help" if message.startswith("unrecognized") else message)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `run` and `doctor` have in common: -np, -H, --hostfile, --oversubscribe, --mpirun."""
    parser.add_argument("-np", dest="np", metavar="N", type=lambda text: AUTO if text == "auto" else _ranks(text),
                        help="number of ranks (processes). auto: one per slot of -H or the hostfile, else one per GPU, "
                        "or per two cores, of this host")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", dest="hosts", action="append", metavar="HOST:SLOTS,...", help="hosts, with the number of "
                       "ranks for each; default: all ranks on this host, or in the allocation of the batch system")
    where.add_argument("--hostfile", metavar="FILE",
                       help="a file of hosts, in the syntax of Open MPI ('node1 slots=4') or MPICH ('node1:4')")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than the hosts have slots")
    parser.add_argument("--mpirun", metavar="PATH", type=os.path.expanduser,
                        help="the mpirun to use; default: the one of this Python environment, or the first on the PATH")


def read_hosts(options: argparse.Namespace) -> HostList | None:
    """Return the hosts of -H or --hostfile; None if neither was given. Raises LaunchError: They cannot be parsed."""
    if options.hosts is not None:
        return parse_list(",".join(options.hosts))
    return read_hostfile(options.hostfile) if options.hostfile is not None else None


def counted(count: int, noun: str) -> str:
    """Return a number and its noun as text: "1 host", "2 hosts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
