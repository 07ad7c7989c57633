"""The part of an elastic job that runs in each rank: the connection to the host's agent, and the commits of the rank.

The module `membership` creates the Member before MPI is initialised. A thread writes commits during the training.
"""

import atexit
import contextlib
import logging
import mmap
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
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NoReturn

from ..core import signal_handlers
from ..core.errors import ElasticError
from ..process import exit_code, procfs
from ..process.connection import Connection, Message, connect
from ..process.launcher_watch import end_now, launcher_here
from . import commits
from .agent import socket_name
from .commits import CommitId, DamagedCommitError, Packed
from .elastic_job import LEAVE_CODE, ElasticJob

logger = logging.getLogger(__name__)

# -- the connection to the agent --------------------------------------------------------------------------------------
# The rank starts an agent if there is none, and continues an agent that is stopped.

_AGENT_LIMIT_S = 20.0  # for an agent to start, and to answer
_AGENT_POLL_S = 0.02  # while it starts, which takes some tenths of a second
_LOOK_S = 0.5  # between two checks whether the agent is stopped
# The numbers of checks after which a stopped agent is continued, and killed. The supervisor gives it up after 6 s.
_LOOKS_TO_CONTINUE, _LOOKS_TO_KILL = 3, 6


class AgentLostError(ElasticError):
    """The agent of this host has ended."""


class AgentConnection:
    """The connection of a rank to the agent of its host. Thread-safe.

    `take` is called with each message that is not an answer to `ask`. `when_lost` is called after the agent has ended.
    Both calls are in a thread of this object. Raises ElasticError: There is no agent, and no agent can be started.
    """

    def __init__(self, job: ElasticJob, take: Callable[[Message], None], when_lost: Callable[[], None]):
        self._job, self._take, self._when_lost = job, take, when_lost
        self._replies: SimpleQueue[tuple[Connection, Message | None]] = SimpleQueue()
        self._asking = threading.Lock()
        self._unanswered, self._lost = 0, -1
        self._number = 0  # of the connection
        self._connect()
        threading.Thread(target=self._watch, name="mpistrat-agent-watch", daemon=True).start()

    def _connect(self) -> None:
        connection = connect_to_agent(self._job)
        self._agent = agent_process(self._job)
        with self._asking:
            self._connection, self._unanswered = connection, 0
            self._number += 1
        connection.read(self._take_next)

    def connect_again(self) -> bool:
        """If the agent has ended, connect to a new agent. Return whether the agent had ended. Raises ElasticError."""
        if self._lost != self._number:
            return False
        self._connect()
        return True

    def _take_next(self, connection: Connection, message: Message | None) -> None:
        if message is None:
            self._lost = self._number
            self._replies.put((connection, None))
            self._when_lost()
        elif message["kind"] == "leave":
            self._take(message)
        else:
            self._replies.put((connection, message))

    def tell(self, **message: object) -> bool:
        """Send a message that the agent does not answer. Return whether the connection is still open."""
        return self._connection.send(**message)

    def ask(self, **message: object) -> Message:
        """Send a message, wait for the agent's answer, and return the answer.

        Raises AgentLostError: The agent has ended. ElasticError: The agent has not answered within 20 s.
        """
        with self._asking:
            connection = self._connection
            self._unanswered += 1
            connection.send(**message)
            while self._lost != self._number:
                try:
                    source, reply = self._replies.get(timeout=_AGENT_LIMIT_S)
                except Empty:
                    raise ElasticError(
                        f"the agent of this host has not answered within {_AGENT_LIMIT_S:g} s") from None
                if source is not connection or reply is None:
                    continue
                self._unanswered -= 1  # Answers come in the order of the questions, including late answers.
                if not self._unanswered:
                    return reply
            raise AgentLostError("the agent of this host has ended")

    def _watch(self) -> None:
        """Every 0.5 s, check whether the agent is stopped (SIGSTOP). Continue it after 1.5 s, or kill it after 3 s."""
        looks = 0
        while True:
            time.sleep(_LOOK_S)
            agent = self._agent
            looks = looks + 1 if agent is not None and agent.is_stopped() else 0
            if agent is not None and looks in (_LOOKS_TO_CONTINUE, _LOOKS_TO_KILL):
                _let_go_on(agent, is_killed=looks == _LOOKS_TO_KILL)


def connect_to_agent(job: ElasticJob) -> Connection:
    """Connect to the agent of this host, and start it if necessary. Raises ElasticError: The agent cannot start."""
    until = time.monotonic() + _AGENT_LIMIT_S
    with contextlib.suppress(OSError):  # This rank is the first to need an agent.
        return connect([socket_name(job)], job.key, _AGENT_LIMIT_S)
    stopped = agent_process(job)
    if stopped is not None and stopped.is_stopped():
        _let_go_on(stopped)
    with tempfile.TemporaryFile() as errors:
        agent = _start_agent(job, errors)
        while True:
            try:
                return connect([socket_name(job)], job.key, _AGENT_LIMIT_S)
            except OSError as error:
                code = agent.poll()
                if code or time.monotonic() > until:
                    errors.seek(0)
                    said = errors.read().decode(errors="replace").strip().rpartition("\n")[2] or error
                    raise ElasticError(f"the agent of this host does not start: {said}. The agent must reach "
                                       f"`mpistrat run` (at {', '.join(job.hosts)}) on port {job.port}.") from None
                time.sleep(_AGENT_POLL_S)


def agent_process(job: ElasticJob) -> procfs.Process | None:
    """Return the process of this host's agent, running or stopped; None if this user has no agent in this container."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # A blocking connect would wait if the listener's backlog is full.
        try:
            asking.connect("\0" + socket_name(job))
            pid, user, _ = struct.unpack("3i", asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return None
    return procfs.find(pid) if pid and user == os.geteuid() else None


def _let_go_on(process: procfs.Process, is_killed: bool = False) -> None:
    how = "is killed and replaced" if is_killed else "gets SIGCONT to go on"
    logger.warning("mpistrat: the agent of this host (process %d) was stopped by a signal or a debugger. The agent %s, "
                   "because no commit can be kept without an agent.", process.pid, how)
    with contextlib.suppress(OSError):  # The agent has just ended.
        os.kill(process.pid, signal.SIGKILL if is_killed else signal.SIGCONT)


def _start_agent(job: ElasticJob, errors: IO[bytes]) -> "subprocess.Popen[bytes]":
    """Start an agent that outlives this process and its launcher. `errors`: The file for the agent's stderr."""
    kept = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "LANG")
    environ = {name: os.environ[name] for name in kept if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    agent = subprocess.Popen([sys.executable, "-m", "mpistrat.elastic.agent"], stdin=subprocess.PIPE,
                              stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=environ)
    # Most of these agents end at once, since another rank has already started an agent.
    threading.Thread(target=agent.wait, name="mpistrat-agent-end", daemon=True).start()
    assert agent.stdin is not None
    with agent.stdin as config:
        config.write(job.to_text().encode())
    return agent


# -- the member --------------------------------------------------------------------------------------------------------

_END_S, _END_POLL_S = 10.0, 0.05  # for another agent to hear how this rank ends, if its agent has just ended


@dataclass(frozen=True)
class Commit:
    """A commit that this process has made or restored."""

    id: CommitId
    snapshot: Callable[[], Any]  # Returns the value, which no longer changes. Called in another thread.
    step: str  # The step of the training, as text for messages.

    def packed(self) -> Packed:
        return Packed((self.id, self.snapshot()))


class Member:
    def __init__(self, job: ElasticJob, rank: int):
        self.job, self._checkpoint_path = job, Path(job.checkpoint, commits.FILE)
        self.why_leave = ""  # Why this generation ends at the next commit; "" if it goes on.
        self._rank, self._size, self._is_connected = rank, 0, False  # The size is known only after a loss.
        self._held: Commit | None = None  # the last one, for another agent
        self._pending: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_written = threading.Event()  # Set when the last commit is written, or cannot be written.
        self._is_written.set()
        self._failure = ""
        self.number = 0  # The number of the last commit of this process, counted over all states of the script.
        self.has_state = False  # Whether the script has a state, which can be committed.
        self._has_said_end, self._leaves = False, ""
        launcher = launcher_here(os.environ)
        self._launcher = 0 if launcher is None else launcher.pid
        self._has_agent = threading.Event()
        self._agent = AgentConnection(job, self._take, self._lose_agent)
        self._welcome = self._hello()
        exit_code.note()
        atexit.register(self._say_end)
        self._watch_for_preemption()
        threading.Thread(target=self._work, name="mpistrat-commits", daemon=True).start()

    # -- news of the agent --------------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        self.why_leave = message["why"]

    def _hello(self) -> Message:
        welcome = self._agent.ask(kind="hello", rank=self._rank, pid=os.getpid(), generation=self.job.generation,
                                   launcher=self._launcher, connected=self._is_connected)
        self._has_agent.set()
        return welcome

    def _lose_agent(self) -> None:
        self._has_agent.clear()
        self._pending.put(self._join_again)

    def connected(self) -> None:
        """Tell the agent that this rank has left init(), and so is connected to the other ranks. Local."""
        self._is_connected = True
        with contextlib.suppress(AgentLostError):  # `_join_again` tells the next agent.
            self._hello()

    def _join_again(self) -> None:
        """After the agent has ended, connect to a new agent (start it if necessary), and give it the last commit."""
        if self._has_said_end:
            return
        try:
            if not self._agent.connect_again():
                return
            logger.info("the agent of this host has ended, and a new agent replaces it")
            self._welcome = self._hello()
            if self._size:
                self.rename(self._rank, self._size)
            if self._held is not None:
                self._hand_over(self._held, is_copy=True)
        except AgentLostError:
            pass  # This is called again.
        except ElasticError as error:
            end_now(f"the agent of this host has ended, and no other agent starts: {error}", LEAVE_CODE)

    # -- commits -------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> CommitId | None:
        """The id of the agent's newest commit, as the agent last told this rank; None: the agent had no commit."""
        found = self._welcome["newest"]
        return None if found is None else CommitId(found["generation"], found["number"])

    def read(self) -> Any:
        """Return the value of the commit `newest`, with arrays in shared memory. Local. Raises DamagedCommitError."""
        found = self._welcome["newest"]
        with open(found["path"], "rb") as file:
            return commits.read(memoryview(mmap.mmap(file.fileno(), found["nbytes"], prot=mmap.PROT_READ)))

    def is_saved(self, number: int, is_last: bool) -> bool:
        """Return whether the chief also saves commit `number` in a file. `is_last`: Whether the ranks end after it."""
        return bool(self.job.checkpoint) and (is_last or number % self.job.checkpoint_every == 0)

    def commit(self, number: int, snapshot: Callable[[], Any], step: str, is_writer: bool, is_saved: bool) -> None:
        """Wait until the previous commit is written, and let a thread write commit `number`. Local.

        `number`: The same on all ranks. `snapshot`, `step`: See Commit. `is_writer`: Whether this rank gives the commit
        to the agent of its host. `is_saved`: Whether this rank also saves the commit in the job's checkpoint directory.

        Raises ElasticError: The previous commit could not be written.
        """
        self.finish()
        self.number = number
        commit = Commit(CommitId(self.job.generation, number), snapshot, step)
        if is_writer or is_saved:
            self._is_written.clear()
            self._pending.put(lambda: self._write(commit, is_writer, is_saved))
        else:
            self._held = commit

    def hold(self, commit: CommitId, snapshot: Callable[[], Any], step: str, is_writer: bool) -> None:
        """Keep a commit of this job that this rank has restored. This rank gives it to each new agent of its host.

        Local; returns at once. `is_writer`: Whether the present agent gets it too. `snapshot`, `step`: See Commit.
        """
        self._held = held = Commit(commit, snapshot, step)
        if is_writer:
            self._pending.put(lambda: self._hand_over(held, is_copy=True))

    def finish(self) -> None:
        """Wait until the last commit is written. Raises ElasticError: The commit could not be written."""
        self._is_written.wait()
        if self._failure:
            failure, self._failure = self._failure, ""
            raise ElasticError(failure)

    def _work(self) -> None:
        while True:
            task = self._pending.get()
            try:
                task()
            except Exception as error:  # The thread has further tasks. `_write` keeps its own errors.
                logger.warning("the last commit could not be copied to the agent of this host: %s", error)

    def _write(self, commit: Commit, is_writer: bool, is_saved: bool) -> None:
        number = commit.id.number
        try:
            packed = commit.packed()
            if is_writer:
                self._hand_over(commit, packed=packed)
            self._held = commit
            if is_saved:
                try:
                    commits.save(packed, str(self._checkpoint_path))
                except OSError as error:  # The commit is in memory. Training goes on.
                    earlier = " The file of an earlier commit is intact." if self._checkpoint_path.exists() else ""
                    logger.warning("commit %d could not be saved in %s: %s.%s", number, self.job.checkpoint, error,
                                   earlier)
        except Exception as error:
            self._failure = f"commit {number} cannot be written: {error}"
            logger.debug("a commit cannot be written", exc_info=True)
        finally:
            self._is_written.set()

    @property
    def newest_of_job(self) -> CommitId | None:
        """The newest commit of the job when this generation started, even if it is lost by now; None: no commit."""
        newest = CommitId(*self.job.newest)
        return newest if newest.number else None

    def _hand_over(self, commit: Commit, packed: Packed | None = None, is_copy: bool = False) -> None:
        """Give a commit to the agent, and wait until the agent keeps it. `is_copy`: See AgentState.asked_to_write."""
        while True:
            try:
                answer = self._agent.ask(kind="commit", commit=[commit.id.generation, commit.id.number],
                                          is_copy=is_copy)
                if answer["kind"] == "there":
                    packed = packed or commit.packed()
                    with open(answer["path"], "r+b") as file:
                        file.truncate(packed.nbytes)
                        with mmap.mmap(file.fileno(), packed.nbytes) as memory, memoryview(memory) as view:
                            packed.write(view)
                    answer = self._agent.ask(kind="written", nbytes=packed.nbytes, step=commit.step)
                self._welcome = answer
                return
            except (AgentLostError, FileNotFoundError):  # The file disappears with the agent.
                if self._has_said_end:
                    return
                self._join_again()

    def saved(self) -> tuple[CommitId, Any] | None:
        """Return the id and the value of the commit in the job's checkpoint directory; None if there is none. Local.

        Raises ElasticError: The file is damaged, cannot be read, or may have been written by another user.
        """
        if not self.job.checkpoint or not self._checkpoint_path.exists():
            return None
        try:
            found, value = commits.load(str(self._checkpoint_path))
        except (OSError, DamagedCommitError) as error:
            raise ElasticError(f"{self._checkpoint_path}: {error}. Remove the file to train from the start.") from None
        return found, value

    # -- the end -------------------------------------------------------------------------------------------------------

    def rename(self, rank: int, size: int) -> None:
        """Tell the agent the new number of this rank and the new number of ranks, after a loss. Local."""
        self._rank, self._size = rank, size
        self._agent.tell(kind="renamed", rank=rank, size=size)

    def _watch_for_preemption(self) -> None:
        """Install a handler for SIGUSR1 (Slurm's --signal). On that signal the host leaves the job at the next commit.

        SIGTERM gets no handler and still ends the process, because mpirun ends ranks by SIGTERM.
        """
        def preempted(number: int, frame: FrameType | None) -> None:
            self._pending.put(lambda: bool(self._agent.tell(kind="preempted", generation=self.job.generation,
                                                             why="SIGUSR1")))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal_handlers.harmless.add(preempted)
            signal.signal(signal.SIGUSR1, preempted)

    def _say_end(self) -> None:
        if self._has_said_end:
            return
        ended = exit_code.final()
        code, why = (LEAVE_CODE, self._leaves) if self._leaves else \
            ended or ((1, "an exception") if hasattr(sys, "last_value") else (0, ""))
        until = time.monotonic() + _END_S
        while not (self._has_agent.is_set() and self._agent.tell(kind="ended", code=code, why=why)):
            if time.monotonic() > until:
                break
            time.sleep(_END_POLL_S)
        self._has_said_end = True

    def leave(self, why: str) -> NoReturn:
        """End this process by SystemExit. The supervisor then starts the next generation. All ranks must call this.

        The exit code is 0: after another code mpirun would kill the other ranks before they tell their agents `why`.
        """
        logger.info("this rank leaves: %s", why)
        self._leaves = why
        sys.exit(0)

    def leave_now(self, why: str) -> NoReturn:
        """End this process at once. Local. The training continues in the next generation, without this process."""
        self._has_said_end = True
        self._agent.tell(kind="ended", code=LEAVE_CODE, why=why)
        end_now(why, LEAVE_CODE)
