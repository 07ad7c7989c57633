"""Names of a strategy's collectives: each thread has a name space of its own, which is the same on all ranks.

Collectives of one name meet in the order in which each rank runs them. That order is the program's within a thread, and
chance between threads, so that two threads must not share names. What the ranks agree on about a thread is what the
program says of it: that it is the main thread, the name that it was given, or else the function that it runs. Numbers
that Python puts into a thread's name are left out: they count threads that another rank may not have.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import InvalidRequestError

# What Python calls threads by itself: threading.Thread's default, executors' threads, and threads of other origin.
_NUMBERED = re.compile(r"(?:(?P<thread>Thread)-\d+(?P<target> \(.*\))?|(?P<foreign>Dummy)-\d+|"
                       r"(?P<executor>ThreadPoolExecutor)-\d+_\d+|(?P<prefix>.+)_\d+)")
# TensorFlow's threads, which run a tf.py_function: any of them, in the order of the graph.
_FOREIGN = "Dummy"


class _State(threading.local):
    space: str | None = None


_state = _State()


def wire_name(operation: str) -> str:
    """The name by which the ranks meet in this thread's `operation`.

    Raises:
        InvalidRequestError: There is another thread here that the ranks cannot tell from this one.
    """
    return f"strategy/{prefix()}{operation}"


def prefix() -> str:
    """What tells this thread's names from those of others: empty in the main thread; raises as `wire_name`."""
    if _state.space is not None:
        return _state.space
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    kind = kind_of(thread.name)
    if kind != _FOREIGN:
        for other in threading.enumerate():
            if other is not thread and kind_of(other.name) == kind:
                raise InvalidRequestError(
                    f"the threads {thread.name!r} and {other.name!r} are both alive, and {thread.name!r} uses a "
                    "collective of MPIStrategy (reading a metric is one). The ranks cannot tell the two apart, and "
                    "would mix up what they reduce. Give each a name of its own that is the same on all ranks: "
                    "threading.Thread(..., name='evaluation').")
    return f"{kind}/"


def kind_of(name: str) -> str:
    """The name of a thread without the numbers that Python has put into it."""
    found = _NUMBERED.fullmatch(name)
    return "".join(part for part in found.groups() if part) if found else name


@contextmanager
def name_space(name: str) -> Iterator[None]:
    """Within it, this thread's collectives have names that begin with `name`, in place of those of the thread."""
    before, _state.space = _state.space, f"{name}/"
    try:
        yield
    finally:
        _state.space = before
