"""Read host lists and hostfiles in the syntax of Open MPI or MPICH, and write lists for either mpirun.

In a hostfile, Open MPI has `node1 slots=4` and MPICH has `node1:4`. Both accept a list `node1:4,node2:4` as an option.
Called by the launcher; local.
"""

import codecs
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import LaunchError

OPEN_MPI = "Open MPI"
HYDRA = "MPICH"  # Hydra is the launcher of MPICH, and of Intel MPI, which is derived from it.

_NAME = re.compile(r"(?:[\w.-]+@)?\w[\w.-]*", re.ASCII)
_SLOT_KEYS = ("slots", "cpu", "count")
# Other keys that each mpirun accepts. Tried with Open MPI 4.1 and 5.0 and with MPICH 5.0.
_OTHER_KEYS = {
    OPEN_MPI: ("max_slots", "max-slots", "slots_max", "slots-max", "username", "user_name", "user-name", "port"),
    HYDRA: ("user", "ifname"),
}


@dataclass(frozen=True)
class Host:
    """One entry of a host list.

    Attributes:
        name: Of the host, possibly with a user (`user@host`).
        slots: Number of ranks. None if a hostfile has no number: the number of cores (Open MPI), or one (MPICH).
        dialects: The launchers that accept the line unchanged.
        extras: Other keys of the line, with their values.
        where: File and line number, for errors.
    """

    name: str
    slots: int | None
    dialects: frozenset[str] = frozenset((OPEN_MPI, HYDRA))
    extras: tuple[str, ...] = ()
    where: str = "-H"


@dataclass(frozen=True)
class HostList:
    """The hosts that ranks run on. `path` is the hostfile, or "" if no mpirun can read it or there is none."""

    hosts: tuple[Host, ...]
    path: str = ""

    @property
    def slots(self) -> int | None:
        """Return the total number of slots; None if a host has no number."""
        counts = [host.slots for host in self.hosts]
        return None if None in counts else sum(count for count in counts if count is not None)

    def readable_by(self, dialect: str) -> bool:
        """Return whether this launcher accepts the hostfile unchanged."""
        return bool(self.path) and all(dialect in host.dialects for host in self.hosts)

    def as_list(self, dialect: str) -> str:
        """Return `name:slots,...`, which every launcher accepts.

        Raises:
            LaunchError: A line of the hostfile has a key that the list cannot express, or lacks a number that this
                launcher needs.
        """
        return ",".join(f"{host.name}:{_slots_for(host, dialect)}" for host in self.hosts)

    def __str__(self) -> str:
        return ", ".join(host.name if host.slots is None else f"{host.name}:{host.slots}" for host in self.hosts)


def parse_list(text: str) -> HostList:
    """Parse `node1:4,node2:4`, the value of -H. A host without a number gets one rank, as with mpirun.

    Raises:
        LaunchError: An entry is not `host:slots`.
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

    Raises:
        LaunchError: The file cannot be read, has no host, or has a line that neither MPI accepts (names the line).
    """
    try:
        path = os.path.expanduser(path)
        content = Path(path).read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(f"--hostfile {path}: {error.strerror}. Give a file with lines like: node1 slots=4") from None
    except UnicodeDecodeError:
        raise LaunchError(f"--hostfile {path}: not a text file.") from None
    hosts = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1)
             if line.split("#")[0].strip()]
    if not hosts:
        raise LaunchError(f"--hostfile {path}: no host in it. Write lines like: node1 slots=4")
    # mpirun takes the byte order mark and the carriage return of Windows for parts of a name, so it gets a list.
    is_of_windows = content.startswith(codecs.BOM_UTF8) or b"\r" in content
    return HostList(tuple(hosts), "" if is_of_windows else path)


def _parse_line(line: str, where: str) -> Host:
    content, has_comment, _ = line.partition("#")
    first, *entries = re.sub(r"\s*=\s*", "=", content).split()
    name, colon, count = first.partition(":")
    slots = int(count) if colon and _is_count(count) else None
    dialects = {HYDRA} if colon else {OPEN_MPI, HYDRA}
    if has_comment or "@" in name:
        dialects.discard(HYDRA)  # MPICH's mpirun takes "#" and "@" for parts of the name.
    extras = []
    wrong = not _NAME.fullmatch(name) or (colon and slots is None)
    for entry in entries:
        key, _, value = entry.partition("=")
        if key in _SLOT_KEYS and _is_count(value) and slots is None:
            slots = int(value)
            dialects &= {OPEN_MPI}
            continue
        accepted_by = {dialect for dialect, keys in _OTHER_KEYS.items() if key in keys and value}
        wrong = wrong or not accepted_by
        dialects &= accepted_by
        extras.append(entry)
    if wrong:
        raise LaunchError(f"{where}: {line.strip()!r} is not a host. Write for example 'node1 slots=4' (Open MPI) or "
                          "'node1:4' (MPICH)")
    return Host(name, slots, frozenset(dialects), tuple(extras), where)


def _slots_for(host: Host, dialect: str) -> int:
    if host.extras or (dialect == HYDRA and "@" in host.name):
        what = ", ".join(host.extras) or host.name
        raise LaunchError(f"{host.where}: this mpirun is {dialect}'s, and the hostfile is not in its syntax; {what} "
                          f"cannot be translated. Write the file for {dialect} (see hostfiles/), or use -H.")
    if host.slots is None and dialect == HYDRA:
        # Open MPI would use the number of cores of that host, which is not known here.
        raise LaunchError(f"{host.where}: this mpirun is {dialect}'s and must be told how many ranks {host.name} "
                          f"takes; write {host.name}:4")
    return 1 if host.slots is None else host.slots


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0
