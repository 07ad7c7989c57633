"""Marks reductions for profilers, while they run, in the thread that runs them.

A timeline is made of what is recorded (trace/), but a profiler must be told while it happens. Nothing is marked, and
nothing is called, as long as no profiler is known.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from .request import Request

# Each makes the context that one profiler shows, of a name: TensorFlow's, or NVTX. Added once, before the first engine.
makers: list[Callable[[str], AbstractContextManager[Any]]] = []
_NOTHING = nullcontext()


def marked(request: Request) -> AbstractContextManager[Any]:
    """The context in which a request is executed, together with those that share its reduction."""
    if not makers:
        return _NOTHING
    name = f"{request.kind.value.upper()} {request.name}"
    if len(makers) == 1:
        return makers[0](name)
    with ExitStack() as stack:
        for make in makers:
            stack.enter_context(make(name))
        return stack.pop_all()


def add(make: Callable[[str], AbstractContextManager[Any]]) -> None:
    """Let a profiler show reductions. Adding one again does nothing."""
    if make not in makers:
        makers.append(make)
