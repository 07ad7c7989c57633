"""An agent: a process that keeps the commits of a job in the memory of one host. `python -m mpistrat.elastic.agent`

The first rank of a host that finds no agent starts an agent, with the job on its stdin. The agent runs in a separate
session without MPI, so it outlives the ranks, and the daemon that started the ranks. The agent ends when the supervisor
has ended, that is when nothing listens at the supervisor's address. If the supervisor is only out of reach, or stopped,
the agent tries to reconnect, for minutes. The commits are in anonymous memory (memfd), which ranks of the same user
open through /proc; the kernel frees the memory with the agent.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

from ..process import procfs
from ..process.connection import Address, Connection, Listening, Message, connect
from .agent_state import BEAT_S, Action, AgentState, Connect, End, Kill, Tell
from .commits import CommitId
from .elastic_job import ElasticJob

logger = logging.getLogger(__name__)
_CONNECT_LIMIT_S = 10.0
_AGAIN_S = 0.5  # between two tries to connect again
_SEGMENTS = "/dev/shm/sm_segment.", "/dev/shm/mpich_shm_"
_Event = tuple[Connection | None, Message | None]


def socket_name(job: ElasticJob) -> str:
    """The abstract name under which the agent of a host listens. Each network namespace has separate names."""
    return f"mpistrat-agent-{job.name}"


class Agent:
    """The process around an AgentState. `listener`: A listening socket, bound to `socket_name`."""

    def __init__(self, job: ElasticJob, listener: socket.socket):
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._memory = [os.memfd_create(f"mpistrat commit {index}") for index in range(2)]
        self._job, self._is_ending = job, False
        self._segments: set[str] = set()  # of MPI's shared memory
        self._unsent: list[Message] = []  # while there is no connection to the supervisor
        self._listening = Listening(
            listener, job.key, lambda connection: connection.read(lambda *event: self._events.put(event)))
        self._supervisor: Connection | None = connect(
            [(host, job.port) for host in job.hosts], job.key, _CONNECT_LIMIT_S)
        self._address: Address = cast("tuple[str, int]", self._supervisor.peer)[:2]
        first, second = (f"/proc/{os.getpid()}/fd/{memory}" for memory in self._memory)
        self._state = AgentState(time.monotonic(), (first, second), job.stay_s)
        self._greet(self._supervisor)

    def run(self) -> None:
        """Serve the job until it is over."""
        beat_at = 0.0
        while not self._is_ending:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_S
                if self._supervisor is not None:
                    self._supervisor.send(kind="beat", sent=now)
                for pid in self._state.in_init:
                    self._note_segments(pid)
            try:
                event = self._events.get(timeout=max(beat_at - now, 0.0))
            except Empty:
                event = None
            actions = self._state.tick(time.monotonic())
            if event is not None:
                actions += self._decide(*event)
            else:  # A process that a rank has forked keeps the connection of the rank open.
                actions += [action for connection, pid in self._state.processes.items() if procfs.find(pid) is None
                            for action in self._state.closed(connection)]
            for action in actions:
                self._act(action)

    def _greet(self, connection: Connection) -> None:
        """Use `connection` as the connection to the supervisor, and send the messages that are still unsent."""
        self._supervisor = connection
        connection.send(kind="agent", host=socket.gethostname(), pid=os.getpid())
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.send(**message)
        connection.send(kind="beat", sent=time.monotonic())
        connection.read(self._take_from_supervisor)

    def _connect_again(self) -> None:
        """Reconnect to the supervisor. Runs in a separate thread, since an address may not answer for seconds."""
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

    def _take_from_supervisor(self, connection: Connection, message: Message | None) -> None:
        if message is None:
            self._events.put((connection, {"kind": "disconnected"}))
        else:
            self._events.put((None, message))

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
        absent = [rank for rank, pid in message["awaited"] if procfs.find(pid) is None]
        return [*self._state.beat(message["generation"], message["sent"], now),
                *(Tell(None, {"kind": "missing", "generation": message["generation"], "rank": rank})
                  for rank in absent)]

    def _act(self, action: Action) -> None:
        if isinstance(action, Tell):
            if action.to is not None:
                cast("Connection", action.to).send(**action.message)
            elif self._supervisor is None or not self._supervisor.send(**action.message):
                self._unsent.append(action.message)
        elif isinstance(action, Kill):
            try:
                os.kill(action.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # The process has just ended.
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
        """Note the files of shared memory that MPI has made, since MPI does not remove the files of killed ranks."""
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return  # The process has just ended.
        self._segments |= {path for entry in maps if (path := entry.rpartition(" ")[2]).startswith(_SEGMENTS)}


def main() -> int:
    """Read the job from stdin and serve it. Returns at once if this host already has an agent."""
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
