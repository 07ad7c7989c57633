"""Whether all threads of this process wait for each other, so that nothing can happen in it. Linux only.

Linux gives the system call that a thread is in. A thread that waits for a lock, a condition or a queue, of Python or of
a library, is in a futex wait. If that has no time limit, and is in memory of this process alone, only another thread of
the process can end it. So if all threads are in such waits, none of them ever goes on: the process is *parked*. A
thread that computes, sleeps, reads a file, or waits for a socket, a device or a process is in another call, or in none.

These threads do not count, since they never call a collective:

- the engine's, which this module is for, and the one that watches the launcher;
- those that MPI has started in init(), which wait for sockets. If a script has imported mpi4py.MPI before, they are not
  known, and the process is never parked.

A thread of Python must wait without a limit. A thread that a library has started may also wait with one, or sleep:
those that measure and tune TensorFlow's input pipelines do that for ever. So a thread of Python that is inside a
library may wait for one that sleeps, and goes on by itself. (TensorFlow lets the deletion of a dataset's iterator wait
in this way, for seconds.) Such a thread counts as one that waits only if the process has submitted a collective in a
graph: then it waits for the graph. Otherwise it must wait for a lock of Python's.

One mistake remains possible: a graph waits for an operation that sleeps in a library, and the process counts as parked.
A wrong report follows only if the ranks also call collectives in different orders (see negotiation/blocked.py), and one
of these collectives depends on the operation that sleeps.

A signal handler of the script may end a wait, or call a collective. So a process that has one is never parked.

CUDA's threads wait for a device, so a process that uses a GPU is never parked. Neither is any process where Linux does
not give the system calls: on some processors, and in some containers.
"""

import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from ..core import handle, signal_handlers
from .queue import TensorQueue

_TASKS = Path("/proc/self/task")
# The number of futex, and those of nanosleep and clock_nanosleep, by processor.
_FUTEX = {"x86_64": 202, "aarch64": 98}
_SLEEPS = {"x86_64": (35, 230), "aarch64": (101, 115)}
# From linux/futex.h: two of the commands, their mask (without FUTEX_CLOCK_REALTIME), and a flag.
_WAIT, _WAIT_BITSET, _COMMANDS, _PRIVATE = 0, 9, 127, 128

ENGINE_THREAD = "mpistrat-engine"
WATCH_THREAD = "mpistrat-launcher-watch"

_HANDLE = handle.__file__
_PYTHONS = os.path.dirname(threading.__file__) + os.sep

_of_libraries: set[int] = set()  # Threads that stay when the engine ends: MPI is initialised once.


class ThreadWait(Enum):
    """How a thread waits for another thread of the process."""

    NOT = 0  # It does something, or waits for something else.
    LIMITED = 1  # Or it sleeps.
    UNLIMITED = 2


def wait_of(text: str, machine: str) -> ThreadWait:
    """How a thread waits.

    Args:
        text: What Linux gives: the number of the system call, its arguments, and two addresses; or "running".
        machine: The processor, as platform.machine() gives it.
    """
    call, *arguments = text.split()
    if call in map(str, _SLEEPS.get(machine, ())):
        return ThreadWait.LIMITED
    if call != str(_FUTEX.get(machine)) or len(arguments) < 4:
        return ThreadWait.NOT
    operation, limit = int(arguments[1], 16), int(arguments[3], 16)
    if not operation & _PRIVATE or operation & _COMMANDS not in (_WAIT, _WAIT_BITSET):
        return ThreadWait.NOT
    return ThreadWait.LIMITED if limit else ThreadWait.UNLIMITED


@contextmanager
def threads_of_libraries() -> Iterator[None]:
    """A context: threads that are started in it do not count from now on, except those that Python starts."""
    before = _threads(_TASKS)
    try:
        yield
    finally:
        _of_libraries.update(_threads(_TASKS) - before - {thread.native_id or 0 for thread in threading.enumerate()})


def _threads(tasks: Path) -> set[int]:
    try:
        return {int(name) for name in os.listdir(tasks)}
    except OSError:
        return set()


def _waits_for_lock(file: str) -> bool:
    """Whether a thread of Python waits for a lock of Python's, given that it waits without a limit.

    It does if its innermost function is in Python's own library, or is the one that waits for a collective.

    Args:
        file: The file of the innermost function.
    """
    return file == _HANDLE or (file.startswith(_PYTHONS) and "site-packages" not in file)


class ThreadScan:
    """Looks at all threads of this process.

    Args:
        tasks: Where Linux describes them.
        machine: The processor.

    Attributes:
        queues: What is submitted to the engines of this process. One engine may wake a thread that another waits for.
    """

    def __init__(self, tasks: Path = _TASKS, machine: str = platform.machine()):
        self._tasks, self._machine = tasks, machine
        self.queues: list[TensorQueue] = []

    def forget(self, queue: TensorQueue) -> None:
        """The engine of this queue has ended."""
        self.queues = [other for other in self.queues if other is not queue]  # Another thread may read the old list.

    def look(self) -> dict[int, int] | None:
        """How often each thread has run, if the process is parked, or None. The calling thread does not count.

        If two looks have the same result, the process has been parked between them without interruption.
        """
        me, started, frames = threading.get_native_id(), threading.enumerate(), sys._current_frames()
        callbacks = frames.keys() - {thread.ident for thread in started}
        if callbacks or signal_handlers.are_installed():
            return None  # Python code in a thread of a library, or a signal that may end a wait.
        ignored = {thread.native_id for thread in started if thread.name in (ENGINE_THREAD, WATCH_THREAD)} | {me}
        pythons = {thread.native_id for thread in started} - ignored
        if not any(queue.has_in_graph() for queue in self.queues):
            own = [frames.get(thread.ident or 0) for thread in started if thread.native_id in pythons]
            if not all(frame is None or _waits_for_lock(frame.f_code.co_filename) for frame in own):
                return None
        ignored |= _of_libraries - pythons
        times_run = {me: 0}  # Another caller is another state.
        try:
            # Python's threads first: on a rank that is busy, it is most often the main thread.
            for thread in sorted(_threads(self._tasks) - ignored, key=lambda thread: thread not in pythons):
                wait = wait_of((self._tasks / str(thread) / "syscall").read_text(), self._machine)
                if wait is ThreadWait.NOT or (wait is ThreadWait.LIMITED and thread in pythons):
                    return None
                times_run[thread] = self._times_run(thread) if wait is ThreadWait.UNLIMITED else 0
        except (OSError, ValueError):
            return None  # A thread has ended, or Linux does not give the calls.
        return times_run

    def _times_run(self, thread: int) -> int:
        status = (self._tasks / str(thread) / "status").read_bytes()
        return sum(map(int, re.findall(rb"ctxt_switches:\s+(\d+)", status)))
