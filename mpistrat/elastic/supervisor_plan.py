"""The decisions of an elastic job's supervisor: when a generation starts, ends at a commit, or is stopped. No I/O.

A *generation* is one mpirun with its ranks. It is over when its mpirun has ended. If all its ranks have reported that
they end with code 0, the job is done. If not, the next generation starts on the available hosts, with back-off and
limits. mpirun's own exit code does not decide this, because it is 0 also after ranks were killed.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..core.topology import rank_list
from .commits import CommitId
from .elastic_job import LEAVE_CODE

# -- the limits, and the actions that the Plan returns -----------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    min_np: int = 1  # The least number of ranks.
    max_np: int = 1  # The greatest number of ranks.
    timeout_s: float = 600.0  # How long the job waits for `min_np` slots.
    resets: int | None = None  # The most generations after the first that start because of a loss; None: no limit.
    # How long a lost host is left out, the first time and at most; each loss doubles the time.
    cooldown_s: tuple[float, float] = (30.0, 600.0)
    restart_failed: bool = False  # Whether a new generation replaces lost ranks, at the next commit.


@dataclass(frozen=True)
class Start:
    generation: int
    ranks: int
    hosts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Leave:
    """An action: tell the ranks of `generation` to end at their next commit."""

    generation: int
    why: str


@dataclass(frozen=True)
class Stop:
    """An action: end the mpirun of `generation` now. `is_done`: Whether all ranks have already ended with code 0."""

    generation: int
    why: str
    is_done: bool = False


@dataclass(frozen=True)
class Done:
    code: int
    why: str


@dataclass(frozen=True)
class Say:
    text: str


Action = Start | Leave | Stop | Done | Say


# -- the hosts ---------------------------------------------------------------------------------------------------------
# The hosts on which a generation may start, and the hosts that are left out for a while.

ANSWER_S = 5.0  # How long an answer of a host counts.


class Hosts:
    """The hosts of a job, by name. `cooldown_s`: See Limits. `own`: Names of the supervisor's host.

    A host is *reached* if its agent is connected, or if it is the supervisor's own host. A host is *there* if it is
    reached or has answered a probe in the last 5 s. On a lost host, or a new host of a running job, ranks start only if
    the host is there.
    """

    def __init__(self, cooldown_s: tuple[float, float], own: Collection[str] = ()):
        self._cooldown_s, self._own = cooldown_s, own
        self._cooled: dict[str, tuple[float, int]] = {}  # until when a host is left out, and how often it has been
        self._gone: dict[str, tuple[float, str]] = {}  # hosts without their agent: since when, and why
        self.answered: dict[str, float] = {}  # the time of a host's last answer
        self.trusted: set[str] = set()  # hosts on which ranks may start without a probe
        self._vain: set[str] = set()  # hosts that answered when they were left out last
        self._kept: set[str] = set()  # hosts with a connected agent
        self.slots: dict[str, int] = {}  # The number of ranks for each host that discovery has found.

    def is_reached(self, host: str) -> bool:
        return host in self._kept or host in self._own

    def is_there(self, host: str, now: float) -> bool:
        return self.is_reached(host) or now - self.answered.get(host, -math.inf) <= ANSWER_S

    def _is_rested(self, host: str, now: float) -> bool:
        return self._cooled.get(host, (now, 0))[0] <= now

    def usable(self, least: int, now: float) -> dict[str, int]:
        """Return the hosts on which ranks may start, each with its number of ranks.

        If these hosts can take fewer than `least` ranks, add excluded hosts that are reached, or that answer probes but
        did not when they were excluded. Add other hosts after their cooldown: a firewall may drop probes to them.
        """
        found = {host: slots for host, slots in self.slots.items()
                 if self._is_rested(host, now) and (host in self.trusted or self.is_there(host, now))}
        return found if sum(found.values()) >= least else {
            host: slots for host, slots in self.slots.items() if self._is_rested(host, now) or self.is_reached(host)
            or (self.is_there(host, now) and host not in self._vain)}

    def room(self, running: Collection[str], now: float) -> dict[str, int]:
        """Return the `running` hosts and all hosts that are there and not excluded, each with its number of ranks."""
        return {host: slots for host, slots in self.slots.items()
                if host in running or (self._is_rested(host, now) and self.is_there(host, now))}

    def unreached(self, now: float, is_needed: bool) -> set[str]:
        """Return the hosts to probe: those that are not reached. `is_needed`: Whether to probe excluded hosts too."""
        return {host for host in self.slots if (is_needed or self._is_rested(host, now)) and not self.is_reached(host)}

    def cool(self, host: str, now: float) -> float:
        """Exclude a host until its cooldown is over. Return the cooldown in seconds."""
        (self._vain.add if self.is_there(host, now) else self._vain.discard)(host)
        first_s, longest_s = self._cooldown_s
        times = self._cooled.get(host, (0.0, 0))[1]
        seconds = min(first_s * 2 ** times, longest_s)
        self._cooled[host] = now + seconds, times + 1
        self.trusted.discard(host)
        return seconds

    def agent_found(self, host: str) -> None:
        self._kept.add(host)
        self.trusted.add(host)
        self._gone.pop(host, None)

    def agent_gone(self, host: str, why: str, since: float) -> None:
        self._kept.discard(host)
        self._gone[host] = min(since, self._gone.get(host, (since, ""))[0]), why

    def lost(self, patience_s: float, now: float) -> dict[str, str]:
        """Return the hosts whose agents have been gone for `patience_s`, with the reasons. Return each loss once."""
        found = {host: why for host, (since, why) in self._gone.items() if now - since >= patience_s}
        for host in found:
            del self._gone[host]
        return found


# -- the generation that runs ------------------------------------------------------------------------------------------
# One mpirun, and the supervisor's knowledge of its ranks.


@dataclass
class Process:
    rank: int
    host: str
    state: str = "runs"  # or "done", "failed", "left", "died"
    is_connected: bool = False  # Whether the rank has left init().
    is_renamed: bool = False


@dataclass
class Generation:
    number: int
    ranks: int  # at the start
    hosts: dict[str, int]  # with the number of ranks of each
    processes: dict[tuple[str, int], Process] = field(default_factory=dict)  # by host and pid
    size: int = 0  # The number of ranks now.
    has_committed: bool = False  # Whether a commit of this generation was kept.
    lost_at: float = math.inf  # The time of the first loss that is not mended; infinite: no such loss.
    ended_at: float = math.inf  # When the last rank has reported its end.
    leaves: str = ""  # Why it ends at its next commit; "" if it goes on.
    is_stopped: bool = False  # Whether its mpirun was told to end.
    heard: set[int] = field(default_factory=set)  # The ranks that have said hello, by their numbers at the start.
    # The ranks whose processes have ended before a hello, each with the time at which this became known.
    missing: dict[int, float] = field(default_factory=dict)

    @property
    def states(self) -> list[str]:
        return [process.state for process in self.processes.values()]

    @property
    def has_loss(self) -> bool:
        return self.lost_at < math.inf

    @property
    def is_done(self) -> bool:
        """Whether all remaining ranks have ended with exit code 0."""
        return self.states.count("done") >= max(self.size, 1) and not self.has_loss

    @property
    def has_left(self) -> bool:
        """Whether the generation was told to end at a commit, and all ranks ended at that commit or with code 0."""
        return bool(self.leaves and self.processes) and all(state in ("left", "done") for state in self.states)

    @property
    def running(self) -> list[Process]:
        return [process for process in self.processes.values() if process.state == "runs"]

    def lose(self, processes: Iterable[Process], now: float) -> None:
        """Note that processes have died: they have ended without a report of their end."""
        for process in processes:
            process.state = "died"
            self.lost_at = min(self.lost_at, now)

    def rename(self, process: Process, rank: int, size: int) -> bool:
        """Note the new number of a rank after a loss. Return True for the first rank that reports the new `size`."""
        process.rank, process.is_renamed = rank, True
        is_first, self.size = self.size != size, size
        alive = self.running
        if sum(each.is_renamed for each in alive) == size:
            self.lost_at = math.inf
            for each in alive:
                if not each.is_renamed:  # Its agent was lost too, so nobody has reported its end.
                    each.state = "died"
                each.is_renamed = False
        return is_first


# -- the plan ----------------------------------------------------------------------------------------------------------

_MOST_FRUITLESS = 3  # The most generations in a row without a new commit. Further ones would end in the same way.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 1.0, 30.0
VERDICT_S = 5.0  # After a failure: until a silent agent must have been heard, or is given up.
RETURN_LIMIT_S = 25.0  # for the ranks to replace an agent that has ended; they end after 20 s without an agent
# After a failure: how long an agent may take to report how its ranks have ended. mpirun may end, because a host is
# lost, before the supervisor knows of the loss.
_TELL_S = 1.0
RECOVERY_LIMIT_S = 15.0  # for the ranks to mend a loss; a loss that is not mended by then cannot be mended
START_LOSS_S = 2.0  # While a rank is in init(), no loss can be mended. Other ranks may still report the same error.
END_LIMIT_S = 15.0  # for mpirun to end after all ranks have reported their ends; it, or MPI_Finalize, may hang
# The exit code after SIGTERM or SIGUSR1, unless a rank has failed: the job can be started again (EX_TEMPFAIL). Jobs
# have this exit code in no other case, since batch scripts requeue a job with this code.
PREEMPTED_CODE = 75


class Plan:
    """The decisions of the supervisor. The methods return the actions to take, in order.

    `now`: The time in seconds, from any origin, here and in all methods. `saves`: Whether the chief saves commits in
    files, with which a later job can continue. `own`: See Hosts.
    """

    def __init__(self, limits: Limits, now: float, saves: bool = False, own: Collection[str] = ()):
        self._limits, self._saves = limits, saves
        self._hosts = Hosts(limits.cooldown_s, own)
        self._running: Generation | None = None
        # After a generation: the hosts that may be lost, with the pids of ranks whose ends are not known.
        self._awaited: dict[str, set[int]] = {}
        self._start_at = self._verdict_at = now
        self._waits_since, self._has_said_wait = now, False
        self._resets = self._fruitless = 0
        self._ending: Done | None = None  # what follows when the generation has ended
        self._preempted = ""  # the signal by which the job ends at the next commit
        self._is_done = False
        self._step = ""  # of the newest commit
        self.generation = 0  # The number of the newest generation; 0 before the first one.
        self.newest = CommitId(0, 0)  # The newest commit that an agent has kept.

    # -- hosts ---------------------------------------------------------------------------------------------------------

    def hosts_found(self, hosts: dict[str, int], now: float) -> list[Action]:
        """Take the hosts that discovery has found, each with its number of ranks."""
        self._hosts.slots = {host: slots for host, slots in hosts.items() if slots > 0}
        if not self.generation:
            self._hosts.trusted.update(self._hosts.slots)
        running = self._running
        if running is None or running.leaves or running.is_stopped:
            return []
        if gone := sorted(host for host in running.hosts if host not in hosts):
            return self._leave(f"{' and '.join(gone)} leave{'s' if len(gone) == 1 else ''} the job")
        return self._grow(now)

    def _grow(self, now: float) -> list[Action]:
        """If a new generation could have more ranks, let the running generation end at its next commit."""
        running = self._running
        if running is None or running.leaves or running.is_stopped or running.has_loss:
            return []
        hosts = self._hosts.room(running.hosts, now)
        room = min(self._limits.max_np, sum(hosts.values()))
        # The slot of a lost rank does not count as room, unless lost ranks are replaced.
        if room <= (running.size if self._limits.restart_failed else running.ranks):
            return []
        self._hosts.trusted.update(hosts)  # The next commit may be far, and an answer old by then.
        return self._leave(f"there is room for {room} ranks instead of {running.size}")

    def _leave(self, why: str) -> list[Action]:
        running = self._running
        assert running is not None
        running.leaves = why
        return [Say(f"{why}: generation {running.number} ends at its next commit"), Leave(running.number, why)]

    @property
    def heard(self) -> set[int]:
        """The ranks of the running generation that have called init(), by the numbers that they had at the start."""
        return set() if self._running is None else self._running.heard

    @property
    def leaving(self) -> Leave | None:
        """The Leave action of the running generation, to send to agents that connect later; None: there is none."""
        running = self._running
        return Leave(running.number, running.leaves) if running is not None and running.leaves else None

    def asked(self, now: float) -> set[str]:
        """Return the hosts to probe. Hosts whose answer would change no decision are not among them."""
        running = self._running
        hosts = self._hosts.unreached(now, is_needed=running is None)
        return hosts if running is None or running.ranks < self._limits.max_np else hosts & running.hosts.keys()

    def answered(self, hosts: Collection[str], now: float) -> list[Action]:
        """Take the hosts that have answered a probe (see `asked`). These hosts, and the network to them, are up."""
        self._hosts.answered.update(dict.fromkeys(hosts, now))
        return self._grow(now)

    def agent_found(self, host: str) -> None:
        self._hosts.agent_found(host)

    def agent_gone(self, host: str, why: str, now: float) -> list[Action]:
        """Note that an agent's connection is closed. While a generation runs, do no more: the agent may reconnect."""
        self._hosts.agent_gone(host, why, now)
        return [] if self._running is not None else self._lose_hosts(0.0, now)

    def host_lost(self, host: str, why: str, now: float) -> list[Action]:
        """Give up a host whose agent has been silent for too long."""
        self._hosts.agent_gone(host, why, -math.inf)
        return self._lose_hosts(RETURN_LIMIT_S, now)

    def _lose_hosts(self, patience_s: float, now: float) -> list[Action]:
        """Give up the hosts that have been without an agent for `patience_s`."""
        actions: list[Action] = []
        for host, why in self._hosts.lost(patience_s, now).items():
            running = self._running
            if running is None:
                # The generation has ended because of the lost host, before the supervisor knew of the loss.
                if not self._hosts.is_reached(host) and self._awaited.pop(host, None) is not None:
                    self._hosts.cool(host, now)
                    actions.append(Say(f"{host} is lost: {why}"))
            elif processes := [process for process in running.running if process.host == host]:
                self._hosts.cool(host, now)
                running.lose(processes, now)
                # No mpirun (Open MPI, MPICH) survives the loss of a host: it ends the job, or waits for minutes.
                actions += [Say(f"{host} is lost: {why}"), *self._stop(f"{host} is lost")]
        return actions

    def _stop(self, why: str) -> list[Action]:
        running = self._running
        if running is None or running.is_stopped:
            return []
        running.is_stopped = True
        return [Stop(running.number, why, running.is_done)]

    # -- what ranks say, through their agents -------------------------------------------------------------------------

    def _process(self, host: str, pid: int, generation: int, ends: bool = False) -> tuple[Generation, Process] | None:
        """Return the running generation and its process `pid`; None if that process or `generation` does not run."""
        if ends and pid in self._awaited.get(host, ()):
            self._awaited[host].discard(pid)
            if not self._awaited[host]:
                del self._awaited[host]
        running = self._generation(generation)
        process = None if running is None else running.processes.get((host, pid))
        return None if running is None or process is None or process.state != "runs" else (running, process)

    def _generation(self, number: int) -> Generation | None:
        return self._running if self._running is not None and self._running.number == number else None

    def missing(self, generation: int, rank: int, now: float) -> None:
        """Note that the process which mpirun started for `rank` has ended. No effect if `rank` has called init()."""
        if (running := self._generation(generation)) is not None and rank not in running.heard:
            running.missing.setdefault(rank, now)

    def hello(self, host: str, rank: int, pid: int, generation: int, is_connected: bool = False) -> None:
        """Note a rank that is in init(), has left init() (`is_connected`), or has connected to a new agent."""
        if (running := self._generation(generation)) is not None:
            if (host, pid) not in running.processes:
                running.heard.add(rank)
                running.missing.pop(rank, None)
            running.processes.setdefault((host, pid), Process(rank, host)).is_connected |= is_connected

    def committed(self, commit: CommitId, step: str) -> None:
        """Note that an agent has kept a commit. `step`: The step of the training, as text for messages."""
        if (running := self._generation(commit.generation)) is not None:
            running.has_committed = True
        if commit >= self.newest:
            self.newest, self._step = commit, step

    def died(self, host: str, pid: int, generation: int, now: float) -> list[Action]:
        """Note that the process of a rank has ended without a report of its end."""
        if (found := self._process(host, pid, generation, ends=True)) is None:
            return []
        running, process = found
        running.lose([process], now)
        return [] if running.is_stopped else [Say(f"rank {process.rank} on {host} (process {pid}) has died")]

    def ended(self, host: str, pid: int, generation: int, code: int, why: str, now: float) -> list[Action]:
        if (found := self._process(host, pid, generation, ends=True)) is None:
            return []
        running, process = found
        process.state = "done" if code == 0 else "left" if code == LEAVE_CODE else "failed"
        if not running.running:
            running.ended_at = now
        if process.state != "failed":
            return []
        running.lost_at = min(running.lost_at, now)
        return [Say(f"rank {process.rank} on {host} ends with exit code {code}" + (f" ({why})" if why else ""))]

    def renamed(self, host: str, pid: int, generation: int, rank: int, size: int, now: float) -> list[Action]:
        """Note that a process continues after a loss as rank `rank` of `size` ranks."""
        if (found := self._process(host, pid, generation)) is None:
            return []
        running, process = found
        said: list[Action] = []
        if running.rename(process, rank, size):
            said = [Say(f"generation {generation} goes on with {size} {'rank' if size == 1 else 'ranks'}")]
        return [*said, *(self._grow(now) if self._limits.restart_failed else [])]

    def preempted(self, host: str, generation: int, why: str, now: float) -> list[Action]:
        """Exclude a host that will be preempted, and end `generation` at its next commit. `why`: The signal."""
        if (running := self._generation(generation)) is None:
            return []
        self._hosts.cool(host, now)
        return [] if running.leaves else self._leave(f"{host} leaves the job ({why})")

    # -- the generation, the user, and the time ------------------------------------------------------------------------

    def signalled(self, name: str, code: int, is_urgent: bool, now: float) -> list[Action]:
        """End the job after a signal to the supervisor: at once with `code` if `is_urgent`, else at the next commit."""
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
        """Decide what follows after the mpirun of a generation has ended with exit code `code`.

        `has_started`: Whether processes have started on all hosts. If not, hosts with neither a rank nor an agent are
        excluded for a while. If there are such hosts, the limits of failures and losses do not count this generation.
        `silent`: The hosts whose agents have been silent for longer than usual, but are not given up yet.
        """
        running = self._running
        if running is None or self._is_done:
            return []
        self._running = None
        if running.has_committed:
            self._fruitless = 0
        cooled = [] if has_started else self._cool_unreached(running, now)
        self._awaited = {host: set() for host in silent if host in running.hosts}
        self._verdict_at = now + (VERDICT_S if self._awaited else _TELL_S)
        for (host, pid), process in running.processes.items():
            if process.state == "runs":
                self._awaited.setdefault(host, set()).add(pid)
        return [*self._lose_hosts(0.0, now), *cooled, *self._after(running, code, bool(cooled), now)]

    def _cool_unreached(self, running: Generation, now: float) -> list[Action]:
        """Exclude unreached hosts where no rank has started. If some of them answer no probes, exclude only these."""
        heard = {process.host for process in running.processes.values()}
        unreached = [host for host in running.hosts if host not in heard and not self._hosts.is_reached(host)]
        silent = [host for host in unreached if not self._hosts.is_there(host, now)]
        return [Say(f"no rank has started on {host}, which is left out for {self._hosts.cool(host, now):g} s")
                for host in silent or unreached]

    def _after(self, running: Generation, code: int, is_vain: bool, now: float) -> list[Action]:
        if running.is_done:
            return self._finish(Done(0, ""))
        if self._ending is not None:
            return self._finish(self._ending)
        if self._preempted:
            why = f"{self._preempted} has arrived"
            if "failed" in running.states:  # A job that is started again would fail again.
                why += f", and generation {running.number} has failed{self._last}"
                return self._finish(Done(_failure(code), why))
            if running.has_left and self._saves and self.newest.number:
                why += f". The job can go on later from {self._named}"
            return self._finish(Done(PREEMPTED_CODE, why))
        if is_vain:
            self._start_at = now
            return []
        self._waits_since, self._has_said_wait = now, False
        if running.has_left:
            self._start_at = self._verdict_at = now
            return []
        self._resets += 1
        self._fruitless += not running.has_committed
        limit = self._limits.resets
        if limit is not None and self._resets > limit:
            return self._finish(Done(_failure(code), f"generation {running.number} has failed, and --reset-limit "
                                                     f"{limit} is reached{self._last}"))
        if self._fruitless >= _MOST_FRUITLESS:
            return self._finish(Done(_failure(code), f"{self._fruitless} generations in a row have failed without a "
                                                     f"commit{self._last}"))
        wait_s = 0.0 if self._fruitless == 0 else min(_FIRST_BACKOFF_S * 2 ** (self._fruitless - 1), _LONGEST_BACKOFF_S)
        self._start_at = now + wait_s
        return []

    @property
    def _named(self) -> str:
        """The newest commit, as text for messages."""
        return str(self.newest) + (f" ({self._step})" if self._step else "")

    @property
    def _last(self) -> str:
        """The end of a message, such as "; the newest commit is commit 3 of generation 1"; "" if there is no commit."""
        return f"; the newest commit is {self._named}" if self.newest.number else ""

    def tick(self, now: float) -> list[Action]:
        """Check all time limits, and start the next generation when it is due. To be called at least every second."""
        if self._is_done:
            return []
        running = self._running
        if running is not None:
            if lost := self._lose_hosts(RETURN_LIMIT_S, now):
                return lost
            if absent := sorted(rank for rank, since in running.missing.items() if now - since > START_LOSS_S):
                return self._stop(f"ranks {rank_list(absent)} ended before init()")
            # The ranks cannot mend the loss of a rank until all of them have left init().
            connected = sum(process.is_connected for process in running.processes.values())
            if connected < running.ranks and now - running.lost_at > START_LOSS_S:
                return self._stop("a rank was lost before all ranks had left init()")
            if now - running.lost_at > RECOVERY_LIMIT_S:
                return self._stop(f"the ranks have not recovered from a loss within {RECOVERY_LIMIT_S:g} s")
            if now - running.ended_at > END_LIMIT_S:
                return self._stop(f"all ranks have ended, but mpirun has not ended within {END_LIMIT_S:g} s")
            return self._grow(now)
        usable = self._hosts.usable(self._limits.min_np, now)
        slots = sum(usable.values())
        if slots < self._limits.min_np:
            if now - self._waits_since > self._limits.timeout_s:
                return self._finish(Done(1, f"there are {slots} slots, but --min-np {self._limits.min_np} needs more. "
                                            f"No more were found in {self._limits.timeout_s:g} s (--elastic-timeout)"
                                            f"{self._last}"))
            if self._has_said_wait:
                return []
            self._has_said_wait = True
            out = [host for host in self._hosts.slots if host not in usable]
            said = f"; {' and '.join(out)} {'is' if len(out) == 1 else 'are'} left out" if out else ""
            return [Say(f"waits for hosts: there are {slots} slots, but --min-np {self._limits.min_np} needs more"
                        f"{said} (--elastic-timeout {self._limits.timeout_s:g})")]
        if now < self._start_at or (self._awaited and now < self._verdict_at):
            return []
        return [self._started(usable)]

    def _started(self, usable: dict[str, int]) -> Start:
        hosts, left = {}, self._limits.max_np
        for host, slots in usable.items():
            if left > 0:
                hosts[host] = min(slots, left)
                left -= hosts[host]
        ranks = sum(hosts.values())
        self.generation += 1
        self._awaited.clear()
        self._running = Generation(self.generation, ranks, hosts, size=ranks)
        return Start(self.generation, ranks, tuple(hosts.items()))

    def _finish(self, done: Done) -> list[Action]:
        self._is_done = True
        return [done]


def _failure(code: int) -> int:
    """Return the exit code of a failed job: mpirun's `code`, but 1 if that is 0 (success) or 75 (preempted)."""
    return 1 if code in (0, PREEMPTED_CODE) else code
