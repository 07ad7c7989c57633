"""An agent: a process that keeps the commits of a job in the memory of one host. `python -m mpistrat.elastic.agent`

A rank that finds no agent on its host starts an agent, and writes the description of the job to the agent's stdin. The
agent has its own session and no MPI. So it outlives the ranks, and the daemon of mpirun that started the ranks. The
agent ends when the supervisor has ended: the supervisor tells it to end, or the supervisor's port refuses connections.
If the supervisor does not answer because of a cut link or SIGSTOP, the agent tries to reconnect for minutes. The
commits are in anonymous memory (memfd), which ranks of the same user open through /proc.
"""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, cast

from ..process import procfs
from ..process.connection import Address, Connection, Listening, Message, connect
from .commits import CommitId
from .elastic_job import ElasticJob

logger = logging.getLogger(__name__)

# -- the decisions -----------------------------------------------------------------------------------------------------
# Which commits an agent keeps, which ranks it ends, and when it ends. Pure: no I/O, no clock.
#
# An agent keeps the last two commits, reports to the supervisor how the ranks of its host end, and ends the ranks if it
# is cut off from the supervisor. So if a broken link splits a job into two parts, only the part that the supervisor
# reaches goes on. The other part makes no commit after `COMMIT_LIMIT_S` without the supervisor, and has ended after
# `LOST_AFTER_S`, before the supervisor starts a new generation elsewhere.
#
# Both limits count from the time at which the last answered heartbeat was *sent*. An answer may be late, or be read
# late since this process was stopped, so its arrival proves less. A commit that arrives after the limit waits for an
# answer.
#
# An agent that is cut off stays, with its commits, for a generation that starts later: as long as the supervisor waits
# for hosts. Old commits do no harm, since the supervisor knows the newest commit.

BEAT_S = 0.5  # between two heartbeats; the supervisor answers each
LOST_AFTER_S = 5.0  # Silence of the supervisor. The supervisor waits for `HOST_LOST_AFTER_S`, which is longer.
COMMIT_LIMIT_S = 4.0
HOST_LOST_AFTER_S = 6.0
SILENT_S = 3 * BEAT_S  # A process idle for this long was stopped. A peer silent for this long may be lost.
BACK_S = 2.0  # for the first answer after this process was stopped
STAY_S = 300.0  # The least time for which an agent stays that is cut off.


@dataclass(frozen=True)
class Slot:
    """A commit in the memory of an agent."""

    id: CommitId
    index: int  # The number of the memory file, 0 or 1.
    nbytes: int  # The size of the commit.


@dataclass(frozen=True)
class Tell:
    """An action: send `message` to a rank of this host (`to` is its connection) or to the supervisor (`to` is None)."""

    to: Hashable | None
    message: dict[str, Any] = field(hash=False)


@dataclass(frozen=True)
class Kill:
    """An action: kill the process `pid`, which is a rank or a launcher of ranks."""

    pid: int


@dataclass(frozen=True)
class Connect:
    """An action: close the connection to the supervisor and reconnect. No effect if a reconnection is in progress."""


@dataclass(frozen=True)
class End:
    """An action: end the agent. In a list of actions it comes after those that kill the ranks of the host."""

    why: str


Action = Tell | Kill | Connect | End


@dataclass
class _Rank:
    rank: int
    pid: int
    generation: int
    launcher: int
    is_connected: bool
    has_ended: bool = False

    def hello(self) -> Tell:
        return Tell(None, {"kind": "hello", "rank": self.rank, "pid": self.pid, "generation": self.generation,
                           "connected": self.is_connected})


@dataclass
class _Write:
    """A request of a rank to write a commit. `nbytes` is None until the rank has written the commit."""

    connection: Hashable
    id: CommitId
    is_copy: bool
    has_file: bool = False
    nbytes: int | None = None
    step: str = ""


class AgentState:
    """The decisions of one agent, without I/O. Each method returns the actions to take, in order.

    `now`: The time in seconds, from any origin, here and in all methods. `paths`: Paths of the two files for commits.
    `stay_s`: How many seconds the agent waits for a supervisor that does not answer, before the agent ends.
    """

    def __init__(self, now: float, paths: Sequence[str] = ("0", "1"), stay_s: float = STAY_S):
        self._paths, self._stay_s = paths, stay_s
        self._heard = -math.inf  # when the last answered heartbeat was sent, on this connection
        self._cut_off_at, self._ticked = now + LOST_AFTER_S, now
        self._is_cut_off, self._cut_off_generation = False, 0
        self.generation = 0  # the newest generation that the supervisor or a rank has named
        self._leave: dict[str, Any] | None = None
        self.ranks: dict[Hashable, _Rank] = {}  # by connection
        self._slots: list[Slot] = []  # the newest last
        self._writes: list[_Write] = []  # The first one may have the free memory file.
        self._is_ending = False

    @property
    def newest(self) -> Slot | None:
        return self._slots[-1] if self._slots else None

    # -- messages of ranks ---------------------------------------------------------------------------------------------

    def hello(self, connection: Hashable, rank: int, pid: int, generation: int, launcher: int = 0,
              is_connected: bool = False) -> list[Action]:
        """Take the hello of a rank. A rank says hello in init(), after init() (`is_connected`), and to a new agent.

        A rank of an old generation is killed. `launcher`: The pid of the process that launched the rank; 0 if unknown.
        """
        if self._is_ending or generation < self.generation or generation <= self._cut_off_generation:
            return [Kill(pid)]
        actions = self._newer(generation)
        known = self.ranks[connection] = _Rank(rank, pid, generation, launcher, is_connected)
        actions += [Tell(connection, {"kind": "welcome", **self._newest()}), known.hello()]
        if self._leave is not None:
            actions.append(Tell(connection, self._leave))
        return actions

    def _newest(self) -> dict[str, Any]:
        newest = self.newest
        return {"newest": None if newest is None else
                {"generation": newest.id.generation, "number": newest.id.number, "path": self._paths[newest.index],
                 "nbytes": newest.nbytes}}

    def asked_to_write(self, connection: Hashable, commit: CommitId, is_copy: bool, now: float) -> list[Action]:
        """Take a rank's request to write a commit. Ranks write one after the other.

        `is_copy`: The commit is not new. If the agent has it or a newer commit, the rank need not write.
        """
        if connection in self.ranks and not self._is_ending:
            self._writes.append(_Write(connection, commit, is_copy))
        return self._serve(now)

    def written(self, connection: Hashable, nbytes: int, step: str, now: float) -> list[Action]:
        """Register that a rank has written its commit to a memory file. `step`: The training step, for messages."""
        if self._writes and self._writes[0].connection == connection and self._writes[0].has_file:
            self._writes[0].nbytes, self._writes[0].step = nbytes, step
        return self._serve(now)

    def _serve(self, now: float) -> list[Action]:
        """Keep the commit that has been written, if any, and let the next rank write. Ranks write one at a time."""
        actions: list[Action] = []
        while self._writes and now - self._heard <= COMMIT_LIMIT_S:
            write, newest = self._writes[0], self.newest
            is_known = write.is_copy and newest is not None and write.id <= newest.id
            free = 1 - newest.index if newest is not None else 0
            if self.ranks[write.connection].generation != self.generation:
                pass  # This rank is being killed.
            elif not write.has_file and not is_known:
                write.has_file = True
                return [*actions, Tell(write.connection, {"kind": "there", "path": self._paths[free]})]
            elif write.has_file and write.nbytes is None:
                return actions
            elif write.nbytes is not None:
                self._slots = [*self._slots[-1:], Slot(write.id, free, write.nbytes)]
                actions.append(Tell(None, {"kind": "committed", "commit": [write.id.generation, write.id.number],
                                           "step": write.step}))
            actions.append(Tell(write.connection, {"kind": "kept", **self._newest()}))
            del self._writes[0]
        return actions

    def renamed(self, connection: Hashable, rank: int, size: int) -> list[Action]:
        """Note the new number of a rank. After a loss the remaining ranks are renumbered from 0 to `size` - 1."""
        known = self.ranks.get(connection)
        if known is None:
            return []
        known.rank = rank
        return [Tell(None, {"kind": "renamed", "rank": rank, "size": size, "pid": known.pid,
                            "generation": known.generation})]

    def ended(self, connection: Hashable, code: int, why: str) -> list[Action]:
        rank = self.ranks.get(connection)
        if rank is None or rank.has_ended:
            return []
        rank.has_ended = True
        return [Tell(None, {"kind": "ended", "pid": rank.pid, "generation": rank.generation, "code": code, "why": why})]

    def closed(self, connection: Hashable) -> list[Action]:
        """Forget a rank whose process has ended. Tell the supervisor, unless the rank has announced its end."""
        rank = self.ranks.pop(connection, None)
        self._writes = [write for write in self._writes if write.connection != connection]
        if rank is None or rank.has_ended:
            return []
        return [Tell(None, {"kind": "died", "pid": rank.pid, "generation": rank.generation})]

    # -- the supervisor ------------------------------------------------------------------------------------------------

    def beat(self, generation: int, sent: float, now: float) -> list[Action]:
        """Take the supervisor's answer to the heartbeat sent at time `sent`. `generation`: The generation that runs."""
        actions = self._newer(generation)
        if now - sent <= LOST_AFTER_S:
            self._heard = max(self._heard, sent)
            self._cut_off_at = max(self._cut_off_at, sent + LOST_AFTER_S)
            self._is_cut_off = False
        return [*actions, *self._serve(now)]

    def disconnected(self) -> list[Action]:
        self._heard = -math.inf
        return [] if self._is_ending else [Connect()]

    def connected(self) -> list[Action]:
        """After a reconnection, tell the supervisor which ranks this host has, because it may not know them."""
        return [rank.hello() for rank in self.ranks.values()]

    def leave(self, generation: int, why: str) -> list[Action]:
        """Pass on the supervisor's order that the ranks of `generation` end at their next commit."""
        if generation < self.generation:
            return []
        actions = self._newer(generation)
        self._leave = {"kind": "leave", "why": why}
        return [*actions, *(Tell(connection, self._leave) for connection in self.ranks)]

    def end(self, why: str) -> list[Action]:
        if self._is_ending:
            return []
        self._is_ending = True
        return [*self._kill_ranks(), End(why)]

    def tick(self, now: float) -> list[Action]:
        """Check how long the supervisor has been silent, and act on it. Must be called at least every `BEAT_S`."""
        if now - self._ticked > SILENT_S:  # This process was stopped, and the supervisor's answers may wait.
            self._cut_off_at = max(self._cut_off_at, now + BACK_S)
        self._ticked = now
        silence = f"nothing has arrived from `mpistrat run` for {LOST_AFTER_S + now - self._cut_off_at:.1f} s"
        if self._is_cut_off:
            return self.end(silence) if now > self._cut_off_at + self._stay_s else []
        if now > self._cut_off_at:
            self._is_cut_off, self._cut_off_generation, self._heard = True, self.generation, -math.inf
            is_cut = any(not rank.has_ended for rank in self.ranks.values())
            return [*self._kill_ranks(), Connect(), *[Tell(None, {"kind": "cut off", "why": silence})] * is_cut]
        return self._serve(now)

    def _kill_ranks(self) -> list[Action]:
        # If this host cannot reach mpirun, the daemon of mpirun would wait for mpirun for minutes.
        launchers = sorted({rank.launcher for rank in self.ranks.values() if rank.launcher})
        return [*(Kill(rank.pid) for rank in self.ranks.values()), *map(Kill, launchers)]

    def _newer(self, generation: int) -> list[Action]:
        """If `generation` is new, note it, and kill the ranks of older generations."""
        if generation <= self.generation:
            return []
        self.generation, self._leave = generation, None
        return [Kill(rank.pid) for rank in self.ranks.values() if rank.generation < generation]


# -- the process -------------------------------------------------------------------------------------------------------

_CONNECT_LIMIT_S = 10.0
_AGAIN_S = 0.5  # between two tries to connect again
_SEGMENTS = "/dev/shm/sm_segment.", "/dev/shm/mpich_shm_"


def socket_name(job: ElasticJob) -> str:
    """Return the name of the abstract Unix socket of a host's agent. Each network namespace has separate names."""
    return f"mpistrat-agent-{job.name}"


class Agent:
    """The process around an AgentState: its sockets and threads. `listener`: A socket that listens at `socket_name`."""

    def __init__(self, job: ElasticJob, listener: socket.socket):
        self._events: SimpleQueue[tuple[Connection | None, Message | None]] = SimpleQueue()
        paths = [f"/proc/{os.getpid()}/fd/{os.memfd_create(f'mpistrat commit {index}')}" for index in range(2)]
        self._job, self._is_ending = job, False
        self._segments: set[str] = set()  # of MPI's shared memory
        self._unsent: list[Message] = []  # while there is no connection to the supervisor
        self._listening = Listening(
            listener, job.key, lambda connection: connection.read(lambda *event: self._events.put(event)))
        self._supervisor: Connection | None = connect(
            [(host, job.port) for host in job.hosts], job.key, _CONNECT_LIMIT_S)
        self._address: Address = cast("tuple[str, int]", self._supervisor.peer)[:2]
        self._state = AgentState(time.monotonic(), paths, job.stay_s)
        self._greet(self._supervisor)

    def run(self) -> None:
        beat_at = 0.0
        while not self._is_ending:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_S
                if self._supervisor is not None:
                    self._supervisor.send(kind="beat", sent=now)
                for rank in self._state.ranks.values():
                    if not rank.is_connected:  # It has not left init().
                        self._note_segments(rank.pid)
            try:
                event = self._events.get(timeout=max(beat_at - now, 0.0))
            except Empty:
                event = None
            actions = self._state.tick(time.monotonic())
            if event is not None:
                actions += self._decide(*event)
            else:  # A process that a rank has forked keeps the connection of the rank open.
                gone = [each for each, rank in self._state.ranks.items() if procfs.find(rank.pid) is None]
                actions += [action for connection in gone for action in self._state.closed(connection)]
            for action in actions:
                self._act(action)

    def _greet(self, connection: Connection) -> None:
        """Use `connection` as the connection to the supervisor, and send the messages that could not be sent before."""
        self._supervisor = connection
        connection.send(kind="agent", host=socket.gethostname(), pid=os.getpid())
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.send(**message)
        connection.send(kind="beat", sent=time.monotonic())
        connection.read(lambda source, message: self._events.put(
            (source, {"kind": "disconnected"}) if message is None else (None, message)))

    def _connect_again(self) -> None:
        """Reconnect to the supervisor. Runs in a separate thread, because one attempt may take seconds."""
        while not self._is_ending:
            try:
                self._events.put((connect([self._address], self._job.key, _CONNECT_LIMIT_S), {"kind": "connected"}))
                return
            except OSError as error:
                logger.debug("the supervisor is out of reach: %s", error)
                if isinstance(error.__cause__, ConnectionRefusedError):
                    self._events.put((None, {"kind": "end", "why": "the supervisor has ended"}))
                    return
            time.sleep(_AGAIN_S)

    def _decide(self, connection: Connection | None, message: Message | None) -> list[Action]:
        state, now = self._state, time.monotonic()
        if message is None:
            return state.closed(connection)
        kind = message["kind"]
        if connection is None:
            return self._decide_of_supervisor(message, now)
        if kind == "connected":
            self._greet(connection)
            return state.connected()
        if kind == "disconnected":  # An earlier connection has been replaced.
            return state.disconnected() if connection is self._supervisor else []
        if kind == "hello":
            if message["connected"]:
                self._note_segments(message["pid"])
            return state.hello(connection, message["rank"], message["pid"], message["generation"], message["launcher"],
                               message["connected"])
        if kind == "commit":
            return state.asked_to_write(connection, CommitId(*message["commit"]), message["is_copy"], now)
        if kind == "written":
            return state.written(connection, message["nbytes"], message["step"], now)
        if kind == "renamed":
            return state.renamed(connection, message["rank"], message["size"])
        if kind == "preempted":
            return [Tell(None, message)]
        return state.ended(connection, message["code"], message["why"])

    def _decide_of_supervisor(self, message: Message, now: float) -> list[Action]:
        if message["kind"] == "leave":
            return self._state.leave(message["generation"], message["why"])
        if message["kind"] == "end":
            return self._state.end(message["why"])
        return [*self._state.beat(message["generation"], message["sent"], now),
                *(Tell(None, {"kind": "missing", "generation": message["generation"], "rank": rank})
                  for rank, pid in message["awaited"] if procfs.find(pid) is None)]

    def _act(self, action: Action) -> None:
        if isinstance(action, Tell):
            if action.to is not None:
                cast("Connection", action.to).send(**action.message)
            elif self._supervisor is None or not self._supervisor.send(**action.message):
                self._unsent.append(action.message)
        elif isinstance(action, Kill):
            with contextlib.suppress(ProcessLookupError):  # The process has just ended.
                os.kill(action.pid, signal.SIGKILL)
        elif isinstance(action, Connect):
            connection, self._supervisor = self._supervisor, None
            if connection is not None:
                connection.close()
                threading.Thread(target=self._connect_again, name="mpistrat-connect", daemon=True).start()
        else:
            assert isinstance(action, End)
            logger.info("the agent ends: %s", action.why)
            self._is_ending = True
            self._listening.close()
            for path in self._segments:
                with contextlib.suppress(OSError):  # MPI has removed it.
                    os.unlink(path)

    def _note_segments(self, pid: int) -> None:
        """Note the shared memory files of MPI in process `pid`. If it is killed, only the agent deletes them."""
        with contextlib.suppress(OSError):  # The process has just ended.
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
            self._segments |= {path for entry in maps if (path := entry.rpartition(" ")[2]).startswith(_SEGMENTS)}


def main() -> int:
    """Run the agent of the job that stdin describes. Return at once if this host already has an agent."""
    job = ElasticJob.from_text(sys.stdin.read())
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + socket_name(job))
    except OSError:
        return 0  # Another rank of this host has started an agent at the same time.
    listener.listen(1024)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Launchers send these signals. Only the supervisor ends the agent.
    Agent(job, listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
