"""Marks reductions for profilers, in the thread that runs the reductions. Nothing is marked while no profiler runs.

A timeline is made later, from records (trace/), but a profiler needs the marks at run time.
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
    """Return the context in which to execute a request and the other requests of its bucket."""
    if not is_on():
        return _NOTHING
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make(f"{request.kind.value.upper()} {request.name}"))
        return stack.pop_all()


def add(make: Callable[[str], AbstractContextManager[Any]], runs: Callable[[], bool] = lambda: True) -> None:
    """Let a profiler show reductions. Adding the same profiler again does nothing.

    `runs` returns whether this profiler runs. With several profilers, `make` is also called while it does not run.
    """
    global is_on
    if make not in makers:
        makers.append(make)
        is_on = (lambda: True) if len(makers) > 1 else runs
