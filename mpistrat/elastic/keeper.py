"""A keeper: a process that keeps the commits of a job in the memory of one host. `python -m mpistrat.elastic.keeper`

The first rank of a host that finds no keeper starts one, with the job on its stdin. The keeper runs in a session of
its own and without MPI, so it outlives ranks, and the daemon that started them. It ends when its supervisor ends, or is
silent for too long. The commits are in anonymous memory (memfd), which ranks of the same user open through /proc; the
kernel frees it with the keeper.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import cast

from ..process import procfs
from ..process.line import Line, Listening, Message, connect
from .job import ElasticJob
from .keeper_state import BEAT_S, Action, End, KeeperState, Kill, Tell

logger = logging.getLogger(__name__)
_CONNECT_LIMIT_S = 10.0
_SEGMENTS = "/dev/shm/sm_segment.", "/dev/shm/mpich_shm_"
_Event = tuple[Line, Message | None]


def socket_name(job: ElasticJob) -> str:
    """The abstract name under which the keeper of a host listens. Network namespaces have names of their own."""
    return f"mpistrat-keeper-{job.name}"


class Keeper:
    """The process around a KeeperState.

    Args:
        job: The job.
        listener: Bound to `socket_name`.
    """

    def __init__(self, job: ElasticJob, listener: socket.socket):
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._state = KeeperState(time.monotonic())
        self._memory = [os.memfd_create(f"mpistrat commit {index}") for index in range(2)]
        self._is_ending = False
        self._segments: dict[int, set[str]] = {}  # of MPI's shared memory, by the process that has mapped them
        self._listening = Listening(listener, job.key, lambda line: line.read(self._take))
        self._supervisor = connect([(host, job.port) for host in job.hosts], job.key, _CONNECT_LIMIT_S)
        self._supervisor.send(kind="keeper", host=socket.gethostname(), pid=os.getpid())
        self._supervisor.read(self._take)

    def run(self) -> None:
        """Serve the job until it is over."""
        beat_at = 0.0
        while not self._is_ending:
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + BEAT_S
                self._supervisor.send(kind="beat")
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

    def _take(self, line: Line, message: Message | None) -> None:
        self._events.put((line, message))

    def _decide(self, line: Line, message: Message | None) -> list[Action]:
        state, now = self._state, time.monotonic()
        kind = None if message is None else message.get("kind")
        if line is self._supervisor:
            if message is None:
                return state.end("the supervisor has ended")
            if kind == "leave":
                return state.leave(message["generation"], message["why"])
            return state.end(message["why"]) if kind == "end" else state.beat(message["generation"], now)
        if message is None:
            return state.closed(line)
        if kind == "hello":
            return state.hello(line, message["rank"], message["pid"], message["generation"], message["launcher"])
        if kind == "where":  # a commit is, or the next one goes
            index = message.get("index", state.free_index())
            line.send(kind="there", path=f"/proc/{os.getpid()}/fd/{self._memory[index]}")
            return []
        if kind == "committed":
            self._note_segments(message["pid"])
            return state.committed(line, message["number"], message["nbytes"], message["step"], now)
        if kind == "renamed":
            return state.renamed(line, message["rank"], message["size"])
        if kind == "preempted":
            self._supervisor.send(**message)
            return []
        return state.ended(line, message["code"], message["why"])

    def _act(self, action: Action) -> None:
        if isinstance(action, Tell):
            line = self._supervisor if action.to is None else cast("Line", action.to)
            line.send(**action.message)
        elif isinstance(action, Kill):
            try:
                os.kill(action.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It has just ended.
        else:
            assert isinstance(action, End)
            logger.info("the keeper ends: %s", action.why)
            self._is_ending = True
            self._listening.close()
            self._remove_segments()

    def _note_segments(self, pid: int) -> None:
        """Note the files of shared memory that MPI has made. It leaves those of ranks that were killed."""
        if pid in self._segments:
            return
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return  # It has just ended.
        self._segments[pid] = {path for line in lines if (path := line.rpartition(" ")[2]).startswith(_SEGMENTS)}

    def _remove_segments(self) -> None:
        for path in set().union(*self._segments.values()):
            with contextlib.suppress(OSError):  # MPI has removed it.
                os.unlink(path)


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
