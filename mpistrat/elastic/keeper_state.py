"""What a keeper decides: which commits it keeps, which ranks end, and when it ends itself. Pure: no I/O, no clock.

A keeper belongs to one job on one host. It keeps the last two commits, tells the supervisor how the ranks of its host
end, and ends them if the supervisor is gone. So of two parts of a job that a broken link has separated, only the part
that the supervisor reaches goes on: the other one makes no commit after `COMMIT_LIMIT_S` without the supervisor, and
has ended after `LOST_AFTER_S`, before the supervisor starts a new generation elsewhere.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .commits import CommitId

BEAT_S = 0.5  # between two heartbeats in each direction
LOST_AFTER_S = 5.0  # Silence of the other side. The supervisor waits for `HOST_LOST_AFTER_S`, which is longer.
COMMIT_LIMIT_S = 4.0
HOST_LOST_AFTER_S = 6.0
START_LIMIT_S = 30.0  # for the first message of the supervisor


@dataclass(frozen=True)
class Slot:
    """A commit in the memory of a keeper.

    Attributes:
        id: Which one.
        index: The number of the memory file, 0 or 1.
        nbytes: Its size.
    """

    id: CommitId
    index: int
    nbytes: int


@dataclass(frozen=True)
class Tell:
    """Send `message` on the line of a rank of this host, or to the supervisor (`to` is None)."""

    to: Hashable | None
    message: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Kill:
    """End this process: a rank's, or one that has launched ranks."""

    pid: int


@dataclass(frozen=True)
class End:
    """End the keeper, after the ranks of its host."""

    why: str


Action = Tell | Kill | End


@dataclass
class _Rank:
    pid: int
    generation: int
    launcher: int
    has_ended: bool = False


class KeeperState:
    """Decisions of one keeper. Each method returns the actions to take, in order. A rank is known by its line.

    Args:
        now: The time, in seconds from any origin, as in all methods.
    """

    def __init__(self, now: float):
        self._heard, self._silence_s = now, START_LIMIT_S
        self.generation = 0  # the newest that the supervisor or a rank has named
        self._leave: dict[str, Any] | None = None
        self._ranks: dict[Hashable, _Rank] = {}  # by line
        self._slots: list[Slot] = []  # the newest last
        self._is_ending = False

    @property
    def newest(self) -> Slot | None:
        """The newest commit."""
        return self._slots[-1] if self._slots else None

    @property
    def processes(self) -> dict[Hashable, int]:
        """The ranks' process numbers, by line."""
        return {line: rank.pid for line, rank in self._ranks.items()}

    def free_index(self) -> int:
        """The memory file that does not have the newest commit."""
        return 1 - self._slots[-1].index if self._slots else 0

    # -- messages of ranks ---------------------------------------------------------------------------------------------

    def hello(self, line: Hashable, rank: int, pid: int, generation: int, launcher: int = 0) -> list[Action]:
        """A rank of this host has connected by `line`. `launcher` is the process that launched it, if known."""
        if self._is_ending or generation < self.generation:
            return [Kill(pid)]
        actions = self._newer(generation)
        self._ranks[line] = _Rank(pid, generation, launcher)
        actions.append(Tell(line, {"kind": "welcome", **self._newest()}))
        actions.append(Tell(None, {"kind": "hello", "rank": rank, "pid": pid, "generation": generation}))
        if self._leave is not None:
            actions.append(Tell(line, self._leave))
        return actions

    def _newest(self) -> dict[str, Any]:
        """What a rank is told about the newest commit."""
        newest = self.newest
        return {"newest": None if newest is None else
                {"generation": newest.id.generation, "number": newest.id.number, "index": newest.index,
                 "nbytes": newest.nbytes}}

    def committed(self, line: Hashable, number: int, nbytes: int, step: str, now: float) -> list[Action]:
        """A rank has written a commit into the memory file `free_index`. `step` says where it is, for people."""
        rank = self._ranks.get(line)
        if rank is None or rank.generation != self.generation or self._is_ending:
            return []
        if now - self._heard > min(COMMIT_LIMIT_S, self._silence_s):
            return [Tell(line, {"kind": "refused",
                                "why": f"the supervisor has been silent for {now - self._heard:.1f} s"})]
        slot = Slot(CommitId(rank.generation, number), self.free_index(), nbytes)
        self._slots = [*self._slots[-1:], slot]
        return [Tell(line, {"kind": "kept", **self._newest()}),
                Tell(None, {"kind": "committed", "generation": rank.generation, "number": number, "step": step})]

    def renamed(self, line: Hashable, rank: int, size: int) -> list[Action]:
        """After a loss, the ranks that are left have numbered themselves anew."""
        known = self._ranks.get(line)
        if known is None:
            return []
        return [Tell(None, {"kind": "renamed", "rank": rank, "size": size, "pid": known.pid,
                            "generation": known.generation})]

    def ended(self, line: Hashable, code: int, why: str) -> list[Action]:
        """A rank says that it ends with this exit code."""
        rank = self._ranks.get(line)
        if rank is None or rank.has_ended:
            return []
        rank.has_ended = True
        return [Tell(None, {"kind": "ended", "pid": rank.pid, "generation": rank.generation, "code": code,
                            "why": why})]

    def closed(self, line: Hashable) -> list[Action]:
        """The line of a rank is closed: its process has ended."""
        rank = self._ranks.pop(line, None)
        if rank is None or rank.has_ended:
            return []
        return [Tell(None, {"kind": "died", "pid": rank.pid, "generation": rank.generation})]

    # -- messages of the supervisor ------------------------------------------------------------------------------------

    def beat(self, generation: int, now: float) -> list[Action]:
        """The supervisor is there, and `generation` is the one that it runs."""
        self._heard, self._silence_s = now, LOST_AFTER_S
        return self._newer(generation)

    def leave(self, generation: int, why: str) -> list[Action]:
        """The ranks of this generation end at their next commit."""
        if generation != self.generation:
            return []
        self._leave = {"kind": "leave", "why": why}
        return [Tell(line, self._leave) for line in self._ranks]

    def end(self, why: str) -> list[Action]:
        """The job is over, or the supervisor's line is closed."""
        if self._is_ending:
            return []
        self._is_ending = True
        # The daemon of an mpirun that this host cannot reach would wait for it for minutes.
        launchers = sorted({rank.launcher for rank in self._ranks.values() if rank.launcher})
        return [*(Kill(rank.pid) for rank in self._ranks.values()), *map(Kill, launchers), End(why)]

    def tick(self, now: float) -> list[Action]:
        """Time has passed. Called at least every `BEAT_S`."""
        if now - self._heard > self._silence_s:
            return self.end(f"the supervisor has been silent for {now - self._heard:.1f} s")
        return []

    def _newer(self, generation: int) -> list[Action]:
        """Make the ranks of earlier generations end."""
        if generation <= self.generation:
            return []
        self.generation, self._leave = generation, None
        return [Kill(rank.pid) for rank in self._ranks.values() if rank.generation < generation]
