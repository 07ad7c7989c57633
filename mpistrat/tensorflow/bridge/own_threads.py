"""Threads for work that blocks its thread: eager operations, and compiled code that goes on when a call is complete.

XLA computes what follows in the thread that completes the call, up to the end of the function. That must not be the
engine's thread, which has other work, and in which no collective can be awaited. Each completion has a thread of its
own until XLA returns from it, so that two functions do not wait for each other. The threads are kept for later ones.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

_Tasks = SimpleQueue[Callable[[], None]]

_idle: list[_Tasks] = []  # Operations on lists are atomic.
_own = threading.local()


def run_in_own_thread(task: Callable[[], None]) -> None:
    """Call `task`, which does not raise, in a thread that does nothing else meanwhile. Any thread may call this."""
    try:
        tasks = _idle.pop()
    except IndexError:
        tasks = SimpleQueue()
        threading.Thread(target=_serve, args=(tasks,), name="mpistrat-blocking", daemon=True).start()
    tasks.put(task)


def is_own() -> bool:
    """Whether the calling thread is one of these."""
    return hasattr(_own, "is_own")


def _serve(tasks: _Tasks) -> None:
    _own.is_own = True
    while True:
        tasks.get()()
        _idle.append(tasks)
