"""Processes of this host, read from Linux's /proc. Without /proc every search finds nothing."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

_STOPPED = "Tt"  # by a signal, or by a debugger
_ENDED = "ZX"  # Zombies stay listed until their parent has collected their exit code.


@dataclass(frozen=True)
class Process:
    """A process. `pid` and `started` together identify it: the kernel may reuse the pid of a process that has ended."""

    pid: int
    started: int  # The start time, in clock ticks since boot.
    parent: int  # The pid of its parent; 0 if the parent is in another container.
    group: int  # Its process group.
    state: str = field(default="", compare=False)  # The kernel's letter for the state of the process.

    def _now(self) -> "Process | None":
        now = find(self.pid)
        return now if now is not None and now.started == self.started else None

    def is_alive(self) -> bool:
        """Return whether the process still exists. A zombie counts as ended."""
        return self._now() is not None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped, by a signal or a debugger. It does nothing until it is continued."""
        return (now := self._now()) is not None and now.state in _STOPPED


def find(pid: int) -> Process | None:
    """Return the process with this pid; None if there is no such process, or if it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return parse_stat(text)


def parse_stat(text: str) -> Process | None:
    """Parse the content of /proc/PID/stat; None for a process that has ended."""
    head, _, tail = text.rpartition(")")  # The second field is the name in parentheses. It can contain any character.
    state, parent, group, *others = tail.split()
    if state in _ENDED:
        return None
    return Process(int(head.split(" ", 1)[0]), int(others[16]), int(parent), int(group), state)


def running() -> list[Process]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [process for name in names if name.isdigit() and (process := find(int(name))) is not None]


def environment_of(pid: int) -> dict[str, str] | None:
    """Return the environment that a process was started with; None if it has ended or belongs to another user."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def ancestors(pid: int) -> Iterator[Process]:
    """Yield the parent of a process, then the parent's parent, and so on, within the same container."""
    process = find(pid)
    while process is not None and process.parent > 0:
        process = find(process.parent)
        if process is not None:
            yield process


def descendants(pid: int, processes: Iterable[Process]) -> list[Process]:
    """Return the children of `pid` among `processes`, the children of these children, and so on."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found = list(children.get(pid, []))
    for process in found:  # The list grows.
        found += children.get(process.pid, [])
    return found
