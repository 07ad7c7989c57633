"""Marks reductions for profilers, while the reductions run, in the thread that runs them.

A timeline is made later, from records (trace/), but a profiler needs the marks at run time. Nothing is marked while no
profiler runs.
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
    name = f"{request.kind.value.upper()} {request.name}"
    if len(makers) == 1:
        return makers[0](name)
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make(name))
        return stack.pop_all()


def _always() -> bool:
    return True


def add(make: Callable[[str], AbstractContextManager[Any]], runs: Callable[[], bool] = _always) -> None:
    """Let a profiler show reductions. Adding the same profiler again does nothing.

    Args:
        make: See `makers`. With several profilers, `make` is also called while this profiler does not run.
        runs: Returns whether this profiler runs. Default: always True.
    """
    global is_on
    if make not in makers:
        makers.append(make)
        is_on = runs if len(makers) == 1 else _always
