"""Processes of this host, as Linux's /proc shows them. Where there is no /proc nothing is found."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_ENDED = "ZX"  # zombies are still listed, until their parent asks for them


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        pid: Its number, which another process may get when it has ended.
        started: When it was started, in ticks since the machine was; with the number it names a process for good.
        parent: The number of its parent; 0 when that is in another container.
        group: Its process group.
    """

    pid: int
    started: int
    parent: int
    group: int

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        now = find(self.pid)
        return now is not None and now.started == self.started


def find(pid: int) -> Process | None:
    """The process of that number, or None if there is none or it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return parse_stat(text)


def parse_stat(text: str) -> Process | None:
    """What /proc/PID/stat says; None of a process that has ended."""
    head, _, tail = text.rpartition(")")  # The second field is a name in brackets, in which anything can stand.
    state, parent, group, *others = tail.split()
    if state in _ENDED:
        return None
    return Process(int(head.split(" ", 1)[0]), int(others[16]), int(parent), int(group))


def everything() -> list[Process]:
    """All processes that have not ended."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    found = (find(int(name)) for name in names if name.isdigit())
    return [process for process in found if process is not None]


def environment_of(pid: int) -> dict[str, str] | None:
    """The environment that a process was started with; None if it has ended, or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = os.fsdecode(file.read())
    except OSError:
        return None
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, equals, value in pairs if equals}


def ancestors(pid: int) -> Iterator[Process]:
    """The parent of a process, the parent's parent, and so on, as far as they are in the same container."""
    process = find(pid)
    while process is not None and process.parent > 0:
        process = find(process.parent)
        if process is not None:
            yield process


def descendants(pid: int, processes: Iterable[Process]) -> list[Process]:
    """Those of `processes` that a process has started, or that these have started, and so on."""
    children: dict[int, list[Process]] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    new = children.get(pid, [])
    while new:
        found += new
        new = [child for process in new for child in children.get(process.pid, [])]
    return found
