"""A rank's line to the keeper of its host: the rank starts one if there is none, and one that is stopped goes on."""

import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from ..core.errors import ElasticError
from ..process import procfs
from ..process.line import Line, Message, connect
from .job import ElasticJob
from .keeper import socket_name

logger = logging.getLogger(__name__)

_KEEPER_LIMIT_S = 20.0  # for a keeper to start, and to answer
_KEEPER_POLL_S = 0.02  # while it starts, which takes some tenths of a second
_LOOK_S = 0.5  # between two looks whether it is stopped
# After so many looks a keeper that is stopped is let go on, and killed: the supervisor gives it up after 6 s.
_LOOKS_TO_CONTINUE, _LOOKS_TO_KILL = 3, 6


class KeeperLostError(ElasticError):
    """The keeper of this host has ended."""


class KeeperLine:
    """Asks the keeper of this host. Any thread may ask; each answer is that to its question.

    Args:
        take: Called with a message that is no answer.
        when_lost: Called when the keeper has ended. Both are called in a thread of this object.

    Raises:
        ElasticError: There is no keeper, and none can be started.
    """

    def __init__(self, job: ElasticJob, take: Callable[[Message], None], when_lost: Callable[[], None]):
        self._job, self._take, self._when_lost = job, take, when_lost
        self._replies: SimpleQueue[tuple[Line, Message | None]] = SimpleQueue()
        self._asking = threading.Lock()
        self._unanswered, self._lost = 0, -1
        self._number = 0  # of the line
        self._connect()
        threading.Thread(target=self._watch, name="mpistrat-keeper-watch", daemon=True).start()

    def _connect(self) -> None:
        line = line_to_keeper(self._job)
        self._keeper = keeper_process(self._job)
        with self._asking:
            self._line, self._unanswered = line, 0
            self._number += 1
        line.read(self._take_next)

    def connect_again(self) -> bool:
        """Connect to another keeper if this one is lost. Returns whether it was. One thread calls it.

        Raises ElasticError: There is no other, and none can be started.
        """
        if self._lost != self._number:
            return False
        self._connect()
        return True

    def _take_next(self, line: Line, message: Message | None) -> None:
        if message is None:
            self._lost = self._number
            self._replies.put((line, None))
            self._when_lost()
        elif message["kind"] == "leave":
            self._take(message)
        else:
            self._replies.put((line, message))

    def tell(self, **message: object) -> bool:
        """Send a message that has no answer. Returns whether the keeper is there."""
        return self._line.send(**message)

    def ask(self, **message: object) -> Message:
        """Send a message and wait for the answer.

        Raises:
            KeeperLostError: The keeper has ended.
            ElasticError: It has not answered in time.
        """
        with self._asking:
            line = self._line
            self._unanswered += 1
            line.send(**message)
            while self._lost != self._number:
                try:
                    source, reply = self._replies.get(timeout=_KEEPER_LIMIT_S)
                except Empty:
                    raise ElasticError(
                        f"the keeper of this host has not answered within {_KEEPER_LIMIT_S:g} s") from None
                if source is not line or reply is None:
                    continue
                self._unanswered -= 1  # Answers come in the order of the questions, those after the limit too.
                if not self._unanswered:
                    return reply
            raise KeeperLostError("the keeper of this host has ended")

    def _watch(self) -> None:
        """Let a keeper go on that is stopped. Nothing else is, then: it would be if a batch system had stopped all."""
        looks = 0
        while True:
            time.sleep(_LOOK_S)
            keeper = self._keeper
            looks = looks + 1 if keeper is not None and keeper.is_stopped() else 0
            if keeper is not None and looks in (_LOOKS_TO_CONTINUE, _LOOKS_TO_KILL):
                _let_go_on(keeper, is_killed=looks == _LOOKS_TO_KILL)


def line_to_keeper(job: ElasticJob) -> Line:
    """Connect to the keeper of this host, and start it if it is not there. Raises ElasticError: It does not start."""
    until = time.monotonic() + _KEEPER_LIMIT_S
    try:
        return connect([socket_name(job)], job.key, _KEEPER_LIMIT_S)
    except OSError:
        pass  # This rank is the first one.
    stopped = keeper_process(job)
    if stopped is not None and stopped.is_stopped():
        _let_go_on(stopped)
    with tempfile.TemporaryFile() as errors:
        keeper = _start_keeper(job, errors)
        while True:
            try:
                return connect([socket_name(job)], job.key, _KEEPER_LIMIT_S)
            except OSError as error:
                code = keeper.poll()
                if code or time.monotonic() > until:
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip().rpartition("\n")[2] or error
                    raise ElasticError(f"the keeper of this host does not start: {said}. It must reach the host of "
                                       f"`mpistrat run` ({', '.join(job.hosts)}) on port {job.port}.") from None
                time.sleep(_KEEPER_POLL_S)


def keeper_process(job: ElasticJob) -> procfs.Process | None:
    """The process of the keeper of this host, which may be stopped.

    None if there is none, or it is in another container, or another user listens there.
    """
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # It would wait if as many wait already as the keeper has places for.
        try:
            asking.connect("\0" + socket_name(job))
            pid, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return procfs.find(pid) if pid and user == os.geteuid() else None


def _let_go_on(process: procfs.Process, is_killed: bool = False) -> None:
    how = "is killed, and another one takes its place" if is_killed else "goes on"
    logger.warning("mpistrat: the keeper of this host (process %d) was stopped, by a signal or a debugger. It %s: "
                   "without it no commit can be kept.", process.pid, how)
    try:
        os.kill(process.pid, signal.SIGKILL if is_killed else signal.SIGCONT)
    except OSError:
        pass  # It has just ended.


def _start_keeper(job: ElasticJob, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start a keeper that outlives this process and its launcher. Its environment has nothing of the launcher."""
    kept = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    keeper = subprocess.Popen([sys.executable, "-m", "mpistrat.elastic.keeper"], stdin=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=environ)
    # Most of them end at once, since another rank has started one before.
    threading.Thread(target=keeper.wait, name="mpistrat-keeper-end", daemon=True).start()
    assert keeper.stdin is not None
    with keeper.stdin as config:
        config.write(job.to_text().encode())
    return keeper
