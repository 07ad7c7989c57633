"""A rank of an elastic job: its line to the keeper of its host, the commits that it hands over, and its end.

`membership` makes it, before MPI is initialised. One thread writes commits, so training goes on meanwhile.
"""

import atexit
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO, Any, NoReturn

from ..core import signal_handlers
from ..core.errors import ElasticError
from ..process import exit_code
from ..process.launcher_watch import end_now, launcher_here
from ..process.line import Line, Message, connect
from . import commits
from .commits import CommitId, DamagedCommitError, Packed
from .job import LEAVE_CODE, ElasticJob
from .keeper import socket_name

logger = logging.getLogger(__name__)

_KEEPER_LIMIT_S = 20.0  # for a keeper to start, and to answer
_KEEPER_POLL_S = 0.02  # while it starts, which takes some tenths of a second
_CHECKPOINT = "commit.mpistrat"


class Member:
    """One rank's part in an elastic job.

    Args:
        job: The job.
        rank: This rank.

    Attributes:
        why_leave: Why this generation ends at the next commit; "" if it goes on.
        number: Of the last commit of this process. All states of a script count together.
    """

    def __init__(self, job: ElasticJob, rank: int):
        self.job, self.why_leave = job, ""
        self._replies: SimpleQueue[Message] = SimpleQueue()
        self._asking = threading.Lock()
        self._unanswered = 0
        self._pending: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._is_written = threading.Event()  # The last commit, or the attempt to write it, is over.
        self._is_written.set()
        self._failure = ""
        self.number = 0
        self._has_said_end, self._leaves = False, ""
        self._line = _line_to_keeper(job)
        self._line.read(self._take)
        launcher = launcher_here(os.environ)
        self._welcome = self._ask(kind="hello", rank=rank, pid=os.getpid(), generation=job.generation,
                                  launcher=0 if launcher is None else launcher.pid)
        exit_code.note()
        atexit.register(self._say_end)
        self._watch_for_preemption()
        threading.Thread(target=self._work, name="mpistrat-commits", daemon=True).start()

    # -- news of the keeper --------------------------------------------------------------------------------------------

    def _take(self, line: Line, message: Message | None) -> None:
        if message is None:
            if not self._has_said_end:
                end_now("the keeper of this host has ended", LEAVE_CODE)
        elif message["kind"] == "leave":
            self.why_leave = message["why"]
        else:
            self._replies.put(message)

    def _ask(self, **message: Any) -> Message:
        with self._asking:
            self._line.send(**message)
            self._unanswered += 1
            while True:
                try:
                    reply = self._replies.get(timeout=_KEEPER_LIMIT_S)
                except Empty:
                    raise ElasticError(
                        f"the keeper of this host has not answered within {_KEEPER_LIMIT_S:g} s") from None
                self._unanswered -= 1  # Answers come in the order of the questions, those after the limit too.
                if not self._unanswered:
                    return reply

    # -- commits -------------------------------------------------------------------------------------------------------

    @property
    def newest(self) -> CommitId | None:
        """The commit that the keeper of this host had when this rank started, or has got from this rank since."""
        found = self._welcome["newest"]
        return None if found is None else CommitId(found["generation"], found["number"])

    def read(self) -> Any:
        """Return the value of `newest`. Its arrays are views of shared memory. Local.

        Raises:
            DamagedCommitError: Its bytes are damaged.
        """
        found = self._welcome["newest"]
        path = self._ask(kind="where", index=found["index"])["path"]
        with open(path, "rb") as file:
            return commits.read(memoryview(mmap.mmap(file.fileno(), found["nbytes"], prot=mmap.PROT_READ)))

    def is_saved(self, number: int, is_last: bool) -> bool:
        """Whether the chief also saves commit `number` in the job's checkpoint directory."""
        return bool(self.job.checkpoint) and (is_last or number % self.job.checkpoint_every == 0)

    def commit(self, number: int, snapshot: Callable[[], Any], step: str, is_writer: bool, is_saved: bool) -> None:
        """Hand over commit `number`. Returns before it is written; waits for the one before it. Local.

        Args:
            number: The same on all ranks.
            snapshot: Returns the value, which no longer changes. Called in another thread.
            step: Where the training is, for people.
            is_writer: Whether this rank writes for its host.
            is_saved: Whether this rank also saves it in the job's checkpoint directory.

        Raises:
            ElasticError: The commit before it could not be written.
        """
        self.finish()
        self.number = number
        if is_writer or is_saved:
            self._is_written.clear()
            self._pending.put(lambda: self._write(number, snapshot, step, is_writer, is_saved))

    def finish(self) -> None:
        """Wait until the last commit is written.

        Raises:
            ElasticError: It could not be written.
        """
        self._is_written.wait()
        if self._failure:
            failure, self._failure = self._failure, ""
            raise ElasticError(failure)

    def _work(self) -> None:
        while True:
            self._pending.get()()

    def _write(self, number: int, snapshot: Callable[[], Any], step: str, is_writer: bool, is_saved: bool) -> None:
        try:
            packed = Packed((CommitId(self.job.generation, number), snapshot()))
            if is_writer:
                self._hand_over(packed, number, step)
            if is_saved:
                try:
                    commits.save(packed, str(self._checkpoint_path))
                except OSError as error:  # The commit in memory is there. Training goes on.
                    logger.warning("commit %d could not be saved in %s: %s. The file of an earlier commit is intact.",
                                   number, self.job.checkpoint, error)
        except Exception as error:
            self._failure = f"commit {number} cannot be written: {error}"
            logger.debug("a commit cannot be written", exc_info=True)
        finally:
            self._is_written.set()

    def _hand_over(self, packed: Packed, number: int, step: str) -> None:
        path = self._ask(kind="where")["path"]
        with open(path, "r+b") as file:
            file.truncate(packed.nbytes)
            with mmap.mmap(file.fileno(), packed.nbytes) as memory, memoryview(memory) as view:
                packed.write(view)
        answer = self._ask(kind="committed", number=number, nbytes=packed.nbytes, step=step, pid=os.getpid())
        if answer["kind"] == "refused":
            end_now(f"the keeper has refused a commit: {answer['why']}", LEAVE_CODE)
        self._welcome = answer

    @property
    def _checkpoint_path(self) -> Path:
        return Path(self.job.checkpoint, _CHECKPOINT)

    def saved(self) -> tuple[CommitId, Any] | None:
        """The newest commit in the job's checkpoint directory, and its value; None if there is none. Local.

        Raises:
            ElasticError: The file is damaged, cannot be read, or may have been written by another user.
        """
        if not self.job.checkpoint or not self._checkpoint_path.exists():
            return None
        try:
            found, value = commits.load(str(self._checkpoint_path))
        except (OSError, DamagedCommitError) as error:
            raise ElasticError(f"{self._checkpoint_path}: {error}. Remove the file to begin without it.") from None
        return found, value

    # -- the end -------------------------------------------------------------------------------------------------------

    def rename(self, rank: int, size: int) -> None:
        """Say that the ranks that are left have numbered themselves anew. Local."""
        self._line.send(kind="renamed", rank=rank, size=size)

    def _watch_for_preemption(self) -> None:
        """Let SIGUSR1 (Slurm's --signal) say that this host leaves the job at the next commit.

        SIGTERM ends the process as always: mpirun sends it to the ranks of a job that it ends.
        """
        def preempted(number: int, frame: FrameType | None) -> None:
            self._pending.put(lambda: bool(self._line.send(kind="preempted", generation=self.job.generation,
                                                           why="SIGUSR1")))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal_handlers.harmless.add(preempted)
            signal.signal(signal.SIGUSR1, preempted)

    def _say_end(self) -> None:
        if self._has_said_end:
            return
        self._has_said_end = True
        ended = exit_code.final()
        code, why = (LEAVE_CODE, self._leaves) if self._leaves else \
            ended or ((1, "an exception") if hasattr(sys, "last_value") else (0, ""))
        self._line.send(kind="ended", code=code, why=why)

    def leave(self, why: str) -> NoReturn:
        """End this process by SystemExit, so that the supervisor starts the next generation. All ranks call it.

        mpirun gets exit code 0, with which it does not end the other ranks before they have said that they leave.
        """
        logger.info("this rank leaves: %s", why)
        self._leaves = why
        sys.exit(0)

    def leave_now(self, why: str) -> NoReturn:
        """End this process at once, since it cannot go on and the next generation can. Local."""
        self._has_said_end = True
        self._line.send(kind="ended", code=LEAVE_CODE, why=why)
        end_now(why, LEAVE_CODE)


def _line_to_keeper(job: ElasticJob) -> Line:
    """Connect to the keeper of this host, and start it if it is not there."""
    until = time.monotonic() + _KEEPER_LIMIT_S
    try:
        return connect([socket_name(job)], job.key, _KEEPER_LIMIT_S)
    except OSError:
        pass  # This rank is the first one.
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
