"""Named ranges for profilers (TensorFlow's, NVTX) around reductions, in the thread that reduces.

The recorder in trace/ cannot supply these ranges, because it notes a reduction only after its end.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from .request import Request

# For each profiler (TensorFlow's, NVTX), a function that makes a named context. Added before the first engine starts.
makers: list[Callable[[str], AbstractContextManager[Any]]] = []
# Whether a profiler runs, as far as it is known. Every small all-reduce calls it, so it must be C code: `bool`, which
# returns False, or TensorFlow's function.
is_on: Callable[[], bool] = bool
_NOTHING = nullcontext()


def marked(request: Request) -> AbstractContextManager[Any]:
    """Return a context manager that marks a reduction for profilers. `request`: The first request in the reduction."""
    if not is_on():
        return _NOTHING
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make(f"{request.kind.value.upper()} {request.name}"))
        return stack.pop_all()


def add(make: Callable[[str], AbstractContextManager[Any]], runs: Callable[[], bool] = lambda: True) -> None:
    """Register a profiler, which then shows reductions. Registering the same profiler again does nothing.

    While `runs()` is true (the profiler runs), every reduction calls `make(name)`, which returns a context manager. If
    several profilers are registered, every reduction calls `make` in any case, and `runs` is never called.
    """
    global is_on
    if make not in makers:
        makers.append(make)
        is_on = (lambda: True) if len(makers) > 1 else runs
