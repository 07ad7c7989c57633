"""Which execution of a collective a gradient is the gradient of.

The gradient of a function that is called several times consists of several calls of one function too, in which the
collectives have the same names. TensorFlow puts the former in the order of the program, the latter in no order. So a
collective in a graph that has a gradient returns the number of its execution, which is the same on all ranks since its
executions meet in this order, and the gradient has the number in its name.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ...api import runtime


@dataclass
class Execution:
    """What the collectives that are being traced know of their execution.

    Attributes:
        number: A tensor of the graph or of the one that it is the gradient of; None until a collective has made it.
        is_past: They are the gradient of the execution with this number.
    """

    number: tf.Tensor | None = None
    is_past: bool = False


_current: ContextVar[Execution | None] = ContextVar("mpistrat_execution", default=None)
_counted: tuple[Callable[[], Any], dict[str, int]] = lambda: None, {}  # a reference to the engine, and by name


def current() -> Execution | None:
    """That of the collectives that are being traced; None if nobody asks for its number."""
    return _current.get()


@contextmanager
def scope(execution: Execution) -> Iterator[Execution]:
    """Collectives that are traced here belong to the execution, and make its number unless it has one."""
    token = _current.set(execution)
    try:
        yield execution
    finally:
        _current.reset(token)


def next_number(name: str) -> int:
    """The number of the execution that begins of a collective of this name."""
    global _counted
    engine = runtime.current().engine
    if _counted[0]() is not engine:
        _counted = weakref.ref(engine), {}  # They begin anew with each engine, on all ranks.
    counts = _counted[1]
    number = counts[name] = counts.get(name, -1) + 1
    return number


def suffix(number: int) -> str:
    """What is added to the names of the collectives that are the gradient of an execution.

    It is never used again. How many executions of a gradient are under way has no bound, and ranks may start them in
    different orders.
    """
    return f"#{number}"
