"""Marks reductions for profilers, while they run, in the thread that runs them.

A timeline is made of what is recorded (trace/), but a profiler must be told while it happens. Nothing is marked as long
as no profiler runs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from .request import Request

# Each makes the context that one profiler shows, of a name: TensorFlow's, or NVTX. Added once, before the first engine.
makers: list[Callable[[str], AbstractContextManager[Any]]] = []
# Whether a profiler runs, as far as that is known. Every small all-reduce calls it: bool, which returns False, and
# TensorFlow's function are C code.
is_on: Callable[[], bool] = bool
_NOTHING = nullcontext()


def marked(request: Request) -> AbstractContextManager[Any]:
    """The context in which a request is executed, together with those that share its reduction."""
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
    """Let a profiler show reductions. Adding one again does nothing.

    Args:
        make: See `makers`. If there are several profilers, it is called while this one does not run, too.
        runs: Whether this profiler runs, if that is known.
    """
    global is_on
    if make not in makers:
        makers.append(make)
        is_on = runs if len(makers) == 1 else _always
