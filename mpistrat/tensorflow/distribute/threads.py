"""Names of a strategy's collectives: each thread has its own name space, which is the same on all ranks.

Collectives of one name are matched in the order in which each rank runs them. Within a thread that is program order;
between threads it is random, so two threads must not share names. The ranks identify a thread by what the program
determines: that it is the main thread, the name it was given, or else the function that it runs. Numbers that Python
adds to a thread's name are left out: they count threads that another rank may not have.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import InvalidRequestError

# Names that Python generates: threading.Thread's default, executors' threads, and threads of other origin.
_NUMBERED = re.compile(r"(?:(?P<thread>Thread)-\d+(?P<target> \(.*\))?|(?P<foreign>Dummy)-\d+|"
                       r"(?P<executor>ThreadPoolExecutor)-\d+_\d+|(?P<prefix>.+)_\d+)")
# Any of TensorFlow's threads may run a tf.py_function, in the order of the graph.
_FOREIGN = "Dummy"


class _ThreadSpace(threading.local):
    space: str | None = None


_state = _ThreadSpace()


def wire_name(operation: str) -> str:
    """The name that identifies this thread's `operation` on all ranks.

    Raises:
        InvalidRequestError: This process has another thread that the ranks cannot distinguish from this one.
    """
    return f"strategy/{prefix()}{operation}"


def prefix() -> str:
    """The prefix of this thread's names: empty in the main thread. Raises as `wire_name`."""
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
    """The name of a thread without the numbers that Python has added."""
    found = _NUMBERED.fullmatch(name)
    return "".join(part for part in found.groups() if part) if found else name


@contextmanager
def name_space(name: str) -> Iterator[None]:
    """A context in which the names of this thread's collectives begin with `name` instead of the thread's prefix."""
    before, _state.space = _state.space, f"{name}/"
    try:
        yield
    finally:
        _state.space = before
