"""Read host lists and hostfiles in the syntax of any launcher, and write the options that pass hosts to a launcher.

In a hostfile, Open MPI has `node1 slots=4` and MPICH has `node1:4`. Both accept a list `node1:4,node2:4` as an option.
The syntaxes stand in the table of launchers (process/launchers.py).
Called by the launcher; local.
"""

import codecs
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LaunchError
from ..process.launchers import STARTED, Launcher

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
    """The hosts of the ranks. `path`: the hostfile; "" if there is none, or if no mpirun can read it."""

    hosts: tuple[Host, ...]
    path: str = ""

    @property
    def slots(self) -> int | None:
        """Return the total number of slots; None if a host has no number."""
        counts = [host.slots for host in self.hosts]
        return None if None in counts else sum(count for count in counts if count is not None)

    def readable_by(self, launcher: Launcher) -> bool:
        """Return whether this launcher accepts the hostfile unchanged."""
        return bool(self.path) and all(launcher in host.readers for host in self.hosts)

    def __str__(self) -> str:
        return ", ".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in self.hosts)


def parse_list(text: str) -> HostList:
    """Parse `node1:4,node2:4`, the value of -H. A host without a number gets one rank, as with mpirun.

    Raises LaunchError: An entry is not `host:slots`.
    """
    hosts = []
    for entry in text.split(","):
        name, colon, slots = entry.strip().partition(":")
        if not _NAME.fullmatch(name) or (colon and not _is_count(slots)):
            raise LaunchError(f"-H {text}: {entry.strip()!r} is not host:slots. Write for example: -H node1:4,node2:4")
        hosts.append(Host(name, int(slots) if colon else 1))
    return HostList(tuple(hosts))


def read_hostfile(path: str) -> HostList:
    """Read a hostfile of either syntax.

    Raises LaunchError: The file cannot be read, has no host, or has a line that no MPI accepts (with its number).
    """
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
    """Return the options that pass the hosts to a launcher, as a hostfile or as a list.

    Raises LaunchError: A line of the hostfile has a key that a list cannot express, or lacks the number of slots that
    this launcher needs. Or the numbers differ, and the launcher accepts one number for all hosts.
    """
    if hosts.readable_by(launcher):
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
        raise LaunchError(f"{host.where}: this mpirun is {launcher.name}'s, but the hostfile has another syntax: "
                          f"{what} cannot be translated. Write the file for {launcher.name} (see hostfiles/), or use "
                          "-H.")
    if host.slots is None and launcher.needs_slots:
        # Open MPI uses the number of cores of the host, which is not known here.
        raise LaunchError(f"{host.where}: this mpirun is {launcher.name}'s and needs the number of ranks of "
                          f"{host.name}. Write for example: {host.name}:4")
    return 1 if host.slots is None else host.slots


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0
