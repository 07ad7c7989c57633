"""A keeper: a process that keeps the commits of a job in the memory of one host. `python -m mpistrat.elastic.keeper`

The first rank of a host that finds no keeper starts one, with the job on its stdin. The keeper runs in a session of
its own and without MPI, so it outlives ranks, and the daemon that started them. It ends when its supervisor has ended:
then nothing listens any more at that address. If the supervisor is only out of reach, or stopped, the keeper connects
again and again, for minutes. The commits are in anonymous memory (memfd), which ranks of the same user open through
/proc; the kernel frees it with the keeper.
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
from ..process.line import Address, Line, Listening, Message, connect
from .commits import CommitId
from .job import ElasticJob
from .keeper_state import BEAT_S, Action, Connect, End, KeeperState, Kill, Tell

logger = logging.getLogger(__name__)
_CONNECT_LIMIT_S = 10.0
_AGAIN_S = 0.5  # between two tries to connect again
_SEGMENTS = "/dev/shm/sm_segment.", "/dev/shm/mpich_shm_"
_Event = tuple[Line | None, Message | None]


def socket_name(job: ElasticJob) -> str:
    """The abstract name under which the keeper of a host listens. Network namespaces have names of their own."""
    return f"mpistrat-keeper-{job.name}"


class Keeper:
    """The process around a KeeperState. `listener`: Bound to `socket_name`."""

    def __init__(self, job: ElasticJob, listener: socket.socket):
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._memory = [os.memfd_create(f"mpistrat commit {index}") for index in range(2)]
        self._job, self._is_ending = job, False
        self._segments: set[str] = set()  # of MPI's shared memory
        self._unsent: list[Message] = []  # while there is no line to the supervisor
        self._listening = Listening(listener, job.key, lambda line: line.read(lambda *event: self._events.put(event)))
        self._supervisor: Line | None = connect([(host, job.port) for host in job.hosts], job.key, _CONNECT_LIMIT_S)
        self._address: Address = cast("tuple[str, int]", self._supervisor.peer)[:2]
        first, second = (f"/proc/{os.getpid()}/fd/{memory}" for memory in self._memory)
        self._state = KeeperState(time.monotonic(), (first, second), job.stay_s)
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
            else:  # A process that a rank has forked keeps the line of the rank open.
                actions += [action for line, pid in self._state.processes.items() if procfs.find(pid) is None
                            for action in self._state.closed(line)]
            for action in actions:
                self._act(action)

    def _greet(self, line: Line) -> None:
        """Make this the line to the supervisor."""
        self._supervisor = line
        line.send(kind="keeper", host=socket.gethostname(), pid=os.getpid())
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            line.send(**message)
        line.send(kind="beat", sent=time.monotonic())
        line.read(self._take_from_supervisor)

    def _connect_again(self) -> None:
        """In a thread of its own: an address may not answer for seconds."""
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

    def _take_from_supervisor(self, line: Line, message: Message | None) -> None:
        if message is None:
            self._events.put((line, {"kind": "disconnected"}))
        else:
            self._events.put((None, message))

    def _decide(self, line: Line | None, message: Message | None) -> list[Action]:
        state, now = self._state, time.monotonic()
        if message is None:
            return state.closed(line)
        kind = message["kind"]
        if line is None:
            return self._decide_of_supervisor(message, now)
        if kind == "connected":
            self._greet(line)
            return state.connected()
        if kind == "disconnected":  # An earlier line has been replaced.
            return state.disconnected() if line is self._supervisor else []
        if kind == "hello":
            if message["connected"]:
                self._note_segments(message["pid"])
            return state.hello(line, message["rank"], message["pid"], message["generation"], message["launcher"],
                               message["connected"])
        if kind == "commit":
            return state.asked_to_write(line, CommitId(*message["commit"]), message["is_copy"], now)
        if kind == "written":
            return state.written(line, message["nbytes"], message["step"], now)
        if kind == "renamed":
            return state.renamed(line, message["rank"], message["size"])
        if kind == "preempted":
            return [Tell(None, message)]
        return state.ended(line, message["code"], message["why"])

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
                cast("Line", action.to).send(**action.message)
            elif self._supervisor is None or not self._supervisor.send(**action.message):
                self._unsent.append(action.message)
        elif isinstance(action, Kill):
            try:
                os.kill(action.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It has just ended.
        elif isinstance(action, Connect):
            line, self._supervisor = self._supervisor, None
            if line is not None:
                line.close()
                threading.Thread(target=self._connect_again, name="mpistrat-connect", daemon=True).start()
        else:
            assert isinstance(action, End)
            logger.info("the keeper ends: %s", action.why)
            self._is_ending = True
            self._listening.close()
            for path in self._segments:
                with contextlib.suppress(OSError):  # MPI has removed it.
                    os.unlink(path)

    def _note_segments(self, pid: int) -> None:
        """Note the files of shared memory that MPI has made. It leaves those of ranks that were killed."""
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return  # It has just ended.
        self._segments |= {path for line in lines if (path := line.rpartition(" ")[2]).startswith(_SEGMENTS)}


def main() -> int:
    """Read the job from stdin and serve it. Returns at once if this host has a keeper already."""
    job = ElasticJob.from_text(sys.stdin.read())
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind("\0" + socket_name(job))
    except OSError:
        return 0  # Another rank of this host has started one at the same time.
    listener.listen(1024)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # Launchers send these to processes of the job. The supervisor ends it.
    Keeper(job, listener).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
