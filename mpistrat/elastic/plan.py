"""What the supervisor of an elastic job decides: when a generation starts, leaves and ends. Pure: no I/O, no clock.

A *generation* is one mpirun with its ranks. It is over when its mpirun has ended. The job is done when all ranks of a
generation say that they have ended with code 0; mpirun's own exit code is not used, since it is 0 after ranks were
killed. Otherwise the next generation starts, on the hosts that there are, with back-off and limits.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from .job import LEAVE_CODE

# Generations in a row that end without a new commit. The next ones would end in the same way.
_MOST_FRUITLESS = 3
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 30.0
# After a failure: how long a keeper that has been silent for a moment may take to be heard again, or to be given up.
VERDICT_S = 5.0
# After a failure: how long a keeper may take to tell how its ranks have ended. mpirun may end, because a host is lost,
# before the supervisor knows of the loss.
_TELL_S = 1.0
# A loss that the ranks have not mended by then is not one that they can mend.
RECOVERY_LIMIT_S = 15.0
# mpirun, or a rank in MPI_Finalize, may not end after all ranks have said that they end.
END_LIMIT_S = 15.0
# The exit code after SIGTERM or SIGUSR1, unless a rank has failed: the job can be started again (EX_TEMPFAIL).
PREEMPTED_CODE = 75


@dataclass(frozen=True)
class Limits:
    """Limits of an elastic job.

    Attributes:
        min_np, max_np: The least and the most ranks.
        timeout_s: How long fewer than `min_np` slots are waited for.
        resets: The most generations after the first one that start because of a loss; None: no limit.
        cooldown_s: How long a lost host is left out, the first time and at most; each loss doubles the time.
        restart_failed: Whether a place that a lost rank has left is filled again, at a commit.
    """

    min_np: int = 1
    max_np: int = 1
    timeout_s: float = 600.0
    resets: int | None = None
    cooldown_s: tuple[float, float] = (30.0, 600.0)
    restart_failed: bool = False


@dataclass(frozen=True)
class Start:
    """Start a generation."""

    generation: int
    ranks: int
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Leave:
    """Tell the ranks of the generation to end at their next commit."""

    generation: int
    why: str


@dataclass(frozen=True)
class Stop:
    """End the generation's mpirun now."""

    generation: int
    why: str


@dataclass(frozen=True)
class Done:
    """The job is over."""

    code: int
    why: str


@dataclass(frozen=True)
class Say:
    """Print a sentence."""

    text: str


Action = Start | Leave | Stop | Done | Say


@dataclass
class _Process:
    """A rank's process, as its keeper has announced it."""

    rank: int
    host: str
    state: str = "runs"  # or "done", "failed", "left", "died"
    is_renamed: bool = False


@dataclass
class _Generation:
    """The generation that runs."""

    number: int
    ranks: int
    hosts: dict[str, int]
    processes: dict[tuple[str, int], _Process] = field(default_factory=dict)  # by host and process number
    size: int = 0  # ranks in it now
    has_committed: bool = False
    lost_at: float = math.inf  # the first loss that is not mended
    ended_at: float = math.inf  # when the last rank said that it ends
    leaves: str = ""
    is_stopped: bool = False


class Plan:
    """The decisions of the supervisor. Each method returns the actions to take, in order.

    Args:
        limits: Limits of the job.
        now: The time, in seconds from any origin, as in all methods.
        saves: Whether commits are saved, for a job that goes on later.

    Attributes:
        generation: The number of the newest generation; 0 before the first one.
        newest: The newest commit, for people; "" if there is none.
    """

    def __init__(self, limits: Limits, now: float, saves: bool = False):
        self._limits, self._saves = limits, saves
        self._hosts: dict[str, int] = {}
        self._cooled: dict[str, tuple[float, int]] = {}  # until when a host is left out, and how often it was
        self._running: _Generation | None = None
        self._kept: set[str] = set()  # those with a keeper
        # Those of which it is not known yet whether they are lost, with the processes whose ends are not known.
        self._awaited: dict[str, set[int]] = {}
        self._start_at = self._verdict_at = now
        self._waits_since, self._has_said_wait = now, False
        self._resets = self._fruitless = 0
        self._ending: Done | None = None  # what follows when the generation has ended
        self._preempted = ""  # the signal by which the job ends at the next commit
        self._is_done = False
        self.generation, self.newest = 0, ""

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def hosts_found(self, hosts: dict[str, int], now: float) -> list[Action]:
        """Discovery has found these hosts, with the number of ranks for each."""
        self._hosts = dict(hosts)
        running = self._running
        if running is None or running.leaves or running.is_stopped:
            return []
        gone = sorted(host for host in running.hosts if host not in hosts)
        if gone:
            return self._leave(f"{' and '.join(gone)} leave{'s' if len(gone) == 1 else ''} the job")
        return self._grow(now)

    def _grow(self, now: float) -> list[Action]:
        """Plan a generation with more ranks, if there is room for them."""
        running = self._running
        if running is None or running.leaves or running.is_stopped or running.lost_at < math.inf:
            return []
        # A place that a lost rank has left is not new room, unless it is to be filled again.
        room = min(self._limits.max_np, sum(self._usable(now).values()))
        now_there = running.size if self._limits.restart_failed else running.ranks
        if room <= now_there:
            return []
        return self._leave(f"there is room for {room} ranks instead of {running.size}")

    def _usable(self, now: float) -> dict[str, int]:
        return {host: slots for host, slots in self._hosts.items()
                if slots > 0 and self._cooled.get(host, (-math.inf, 0))[0] <= now}

    def _leave(self, why: str) -> list[Action]:
        running = self._running
        assert running is not None
        running.leaves = why
        return [Say(f"{why}: generation {running.number} ends at its next commit"), Leave(running.number, why)]

    def keeper_found(self, host: str) -> list[Action]:
        """The keeper of a host has connected."""
        self._kept.add(host)
        return []

    def host_lost(self, host: str, why: str, now: float) -> list[Action]:
        """The keeper of a host is gone or silent."""
        self._kept.discard(host)
        running = self._running
        if running is None:
            # The generation has ended because of it, before the supervisor knew.
            if self._awaited.pop(host, None) is None:
                return []
            self._cool(host, now)
            return [Say(f"{host} is lost: {why}")]
        if not any(process.host == host and process.state == "runs" for process in running.processes.values()):
            return []
        self._cool(host, now)
        for process in running.processes.values():
            if process.host == host and process.state == "runs":
                process.state = "died"
        running.lost_at = min(running.lost_at, now)
        # Neither maker's mpirun survives the loss of a host: it ends the job, or waits for minutes.
        return [Say(f"{host} is lost: {why}"), *self._stop(f"{host} is lost")]

    def _cool(self, host: str, now: float) -> None:
        first_s, longest_s = self._limits.cooldown_s
        times = self._cooled.get(host, (0.0, 0))[1]
        self._cooled[host] = now + min(first_s * 2 ** times, longest_s), times + 1

    def _stop(self, why: str) -> list[Action]:
        running = self._running
        if running is None or running.is_stopped:
            return []
        running.is_stopped = True
        return [Stop(running.number, why)]

    # -- what ranks say, through their keepers -------------------------------------------------------------------------

    def _process(self, host: str, pid: int, generation: int) -> _Process | None:
        running = self._running
        if running is None or running.number != generation:
            return None
        return running.processes.get((host, pid))

    def _note_end(self, host: str, pid: int) -> None:
        """Note how a process has ended of a generation that is over."""
        if pid in self._awaited.get(host, ()):
            self._awaited[host].discard(pid)
            if not self._awaited[host]:
                del self._awaited[host]

    def hello(self, host: str, rank: int, pid: int, generation: int) -> list[Action]:
        """A rank has started."""
        running = self._running
        if running is not None and running.number == generation:
            running.processes[host, pid] = _Process(rank, host)
        return []

    def committed(self, generation: int, number: int, step: str) -> list[Action]:
        """A keeper has kept a commit."""
        if self._running is not None and self._running.number == generation:
            self._running.has_committed = True
        self.newest = f"commit {number} of generation {generation}" + (f" ({step})" if step else "")
        return []

    def died(self, host: str, pid: int, generation: int, now: float) -> list[Action]:
        """The process of a rank has ended without saying so."""
        self._note_end(host, pid)
        process, running = self._process(host, pid, generation), self._running
        if process is None or running is None or process.state != "runs":
            return []
        process.state = "died"
        running.lost_at = min(running.lost_at, now)
        return [Say(f"rank {process.rank} on {host} (process {pid}) is lost")]

    def ended(self, host: str, pid: int, generation: int, code: int, why: str, now: float) -> list[Action]:
        """A rank ends with this exit code."""
        self._note_end(host, pid)
        process, running = self._process(host, pid, generation), self._running
        if process is None or running is None or process.state != "runs":
            return []
        process.state = "done" if code == 0 else "left" if code == LEAVE_CODE else "failed"
        if not any(each.state == "runs" for each in running.processes.values()):
            running.ended_at = now
        if process.state == "failed":
            running.lost_at = min(running.lost_at, now)
            return [Say(f"rank {process.rank} on {host} ends with exit code {code}" + (f" ({why})" if why else ""))]
        return []

    def renamed(self, host: str, pid: int, generation: int, rank: int, size: int, now: float) -> list[Action]:
        """The ranks that are left after a loss go on with new numbers."""
        process, running = self._process(host, pid, generation), self._running
        if process is None or running is None:
            return []
        process.rank, process.is_renamed = rank, True
        first = running.size != size
        running.size = size
        alive = [each for each in running.processes.values() if each.state == "runs"]
        if all(each.is_renamed for each in alive) and len(alive) == size:
            running.lost_at = math.inf
            for each in alive:
                each.is_renamed = False
        said: list[Action] = [Say(f"generation {generation} goes on with {size} "
                                  f"{'rank' if size == 1 else 'ranks'}")] if first else []
        return [*said, *(self._grow(now) if self._limits.restart_failed else [])]

    def preempted(self, host: str, generation: int, why: str, now: float) -> list[Action]:
        """A host is to be taken away."""
        running = self._running
        if running is None or running.number != generation:
            return []
        self._cool(host, now)
        return [] if running.leaves else self._leave(f"{host} is taken away ({why})")

    # -- the generation, the user, and the time ------------------------------------------------------------------------

    def signalled(self, name: str, code: int, is_urgent: bool, now: float) -> list[Action]:
        """The supervisor has received a signal.

        Args:
            name: Of the signal.
            code: The exit code, if `is_urgent`.
            is_urgent: Whether the job ends at once, as by Ctrl-C; else at the next commit.
        """
        if self._is_done:
            return []
        if is_urgent:
            self._ending = Done(code, "")
            return self._stop(f"{name} has arrived") if self._running else self._finish(self._ending)
        self._preempted = self._preempted or name
        if self._running is None:
            return self._finish(Done(PREEMPTED_CODE, f"{name} has arrived"))
        return [] if self._running.leaves else self._leave(f"{name} has arrived")

    def generation_over(self, generation: int, code: int, now: float, has_started: bool = True,
                        silent: Collection[str] = ()) -> list[Action]:
        """The mpirun of the generation has ended.

        Args:
            generation: Its number.
            code: mpirun's exit code, for people.
            now: The time.
            has_started: Whether processes have started on all hosts.
            silent: The hosts whose keepers have not been heard for longer than usual, but are not given up yet.
        """
        running, self._running = self._running, None
        if running is None or self._is_done:
            return []
        if not has_started:
            heard = {process.host for process in running.processes.values()} | self._kept
            for host in running.hosts:
                if heard and host not in heard:
                    self._cool(host, now)
        self._awaited = {host: set() for host in silent if host in running.hosts}
        self._verdict_at = now + (VERDICT_S if self._awaited else _TELL_S)
        for (host, pid), process in running.processes.items():
            if process.state == "runs":
                self._awaited.setdefault(host, set()).add(pid)
        states = [process.state for process in running.processes.values()]
        if states.count("done") >= max(running.size, 1) and running.lost_at == math.inf:
            return self._finish(Done(0, ""))
        if self._ending is not None:
            return self._finish(self._ending)
        has_left = bool(running.leaves and states) and all(state in ("left", "done") for state in states)
        if self._preempted:
            why = f"{self._preempted} has arrived"
            if "failed" in states:  # A job that is started again would fail again.
                return self._finish(Done(code or 1, f"{why}, and generation {running.number} has failed{self._last}"))
            if has_left and self._saves and self.newest:
                why += f". The job can go on later from {self.newest}"
            return self._finish(Done(PREEMPTED_CODE, why))
        self._waits_since, self._has_said_wait = now, False
        if has_left:
            self._start_at = self._verdict_at = now
            return []
        return self._count_failure(running, code, now)

    @property
    def _last(self) -> str:
        """The end of a sentence: from which commit the job could go on."""
        return f"; the last is {self.newest}" if self.newest else ""

    def _count_failure(self, running: _Generation, code: int, now: float) -> list[Action]:
        self._resets += 1
        self._fruitless = 0 if running.has_committed else self._fruitless + 1
        limit = self._limits.resets
        if limit is not None and self._resets > limit:
            return self._finish(Done(code or 1, f"generation {running.number} has failed, and --reset-limit {limit} "
                                                f"is reached{self._last}"))
        if self._fruitless >= _MOST_FRUITLESS:
            return self._finish(Done(code or 1, f"{self._fruitless} generations in a row have failed before a commit"
                                                f"{self._last}"))
        wait_s = 0.0 if self._fruitless == 0 else min(_FIRST_BACKOFF_S * 2 ** (self._fruitless - 1), _LONGEST_BACKOFF_S)
        self._start_at = now + wait_s
        return []

    def tick(self, now: float) -> list[Action]:
        """Time has passed. Called at least once per second."""
        if self._is_done:
            return []
        running = self._running
        if running is not None:
            if now - running.lost_at > RECOVERY_LIMIT_S:
                return self._stop(f"a loss was not mended within {RECOVERY_LIMIT_S:g} s")
            if now - running.ended_at > END_LIMIT_S:
                return self._stop(f"all ranks have ended, and mpirun has not within {END_LIMIT_S:g} s")
            return self._grow(now)
        usable = self._usable(now)
        slots = sum(usable.values())
        if slots < self._limits.min_np:
            if now - self._waits_since > self._limits.timeout_s:
                return self._finish(Done(1, f"there are {slots} slots, and --min-np {self._limits.min_np} asks for "
                                            f"more. None have come in {self._limits.timeout_s:g} s (--elastic-timeout)"
                                            f"{self._last}"))
            if self._has_said_wait:
                return []
            self._has_said_wait = True
            return [Say(f"waits for hosts: there are {slots} slots, and --min-np {self._limits.min_np} asks for more")]
        if now < self._start_at or (self._awaited and now < self._verdict_at):
            return []
        return [self._started(usable)]

    def _started(self, usable: dict[str, int]) -> Start:
        ranks, hosts, left = min(self._limits.max_np, sum(usable.values())), {}, self._limits.max_np
        for host, slots in usable.items():
            if left > 0:
                hosts[host] = min(slots, left)
                left -= hosts[host]
        self.generation += 1
        self._awaited.clear()
        self._running = _Generation(self.generation, ranks, hosts, size=ranks)
        return Start(self.generation, ranks, tuple(hosts.items()))

    def _finish(self, done: Done) -> list[Action]:
        self._is_done = True
        return [done]
