"""A generation of an elastic job: one mpirun, and what its supervisor knows of the ranks. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from .job import LEAVE_CODE


@dataclass
class Process:
    """A rank's process, as its keeper has announced it."""

    rank: int
    host: str
    state: str = "runs"  # or "done", "failed", "left", "died"
    is_connected: bool = False  # It has left init().
    is_renamed: bool = False


@dataclass
class Generation:
    """The generation that runs."""

    number: int
    ranks: int  # How many it has started with.
    hosts: dict[str, int]  # The number of ranks for each host.
    processes: dict[tuple[str, int], Process] = field(default_factory=dict)  # By host and process number.
    size: int = 0  # How many ranks it has now.
    has_committed: bool = False  # Whether a commit was kept.
    lost_at: float = math.inf  # When the first loss was that is not mended; infinite: there is none.
    ended_at: float = math.inf  # When the last rank has said that it ends.
    leaves: str = ""  # Why it ends at its next commit; "" if it goes on.
    is_stopped: bool = False  # Whether its mpirun was told to end.
    heard: set[int] = field(default_factory=set)  # The ranks that have said hello, as they were numbered at the start.
    # The ranks whose processes have ended before they were heard of, and since when that is known.
    missing: dict[int, float] = field(default_factory=dict)

    @property
    def states(self) -> list[str]:
        return [process.state for process in self.processes.values()]

    @property
    def are_all_connected(self) -> bool:
        """Whether all ranks have left init(). Before that none of them can mend the loss of another."""
        return sum(process.is_connected for process in self.processes.values()) >= self.ranks

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss that is not mended."""
        return self.lost_at < math.inf

    @property
    def is_done(self) -> bool:
        """Whether all ranks that there are have ended with exit code 0."""
        return self.states.count("done") >= max(self.size, 1) and not self.has_loss

    @property
    def has_left(self) -> bool:
        """Whether it was to end at a commit, and all ranks have."""
        return bool(self.leaves and self.processes) and all(state in ("left", "done") for state in self.states)

    def hello(self, host: str, rank: int, pid: int, is_connected: bool) -> None:
        """A rank is there: for the first time, or again, since it has left init() or found another keeper."""
        if (host, pid) not in self.processes:
            self.heard.add(rank)
            self.missing.pop(rank, None)
        process = self.processes.setdefault((host, pid), Process(rank, host))
        process.is_connected |= is_connected

    def running_on(self, host: str) -> list[Process]:
        """The processes of a host that have not ended."""
        return [process for process in self.processes.values() if process.host == host and process.state == "runs"]

    def lose(self, processes: Iterable[Process], now: float) -> None:
        """These processes have ended without saying so."""
        for process in processes:
            process.state = "died"
            self.lost_at = min(self.lost_at, now)

    def end(self, process: Process, code: int, now: float) -> None:
        """A process ends with this exit code."""
        process.state = "done" if code == 0 else "left" if code == LEAVE_CODE else "failed"
        if "runs" not in self.states:
            self.ended_at = now
        if process.state == "failed":
            self.lost_at = min(self.lost_at, now)

    def rename(self, process: Process, rank: int, size: int) -> bool:
        """A rank goes on with a new number after a loss. Returns whether it is the first to do so."""
        process.rank, process.is_renamed = rank, True
        is_first, self.size = self.size != size, size
        alive = [each for each in self.processes.values() if each.state == "runs"]
        if sum(each.is_renamed for each in alive) == size:
            self.lost_at = math.inf
            for each in alive:
                if not each.is_renamed:  # Its keeper was lost with it, and nobody else tells.
                    each.state = "died"
                each.is_renamed = False
        return is_first
