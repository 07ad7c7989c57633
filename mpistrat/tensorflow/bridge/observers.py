"""An observer is called with this rank's arrays when a collective of a graph runs, before they are submitted.

The collective that is traced first in the context `observed` claims the observer. A context variable carries it there
past the functions in between, which deal with compression, sparse tensors and gradients of gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

# Called with the arrays, and with the part of names that stands for the thread that runs the graph. Returns whether it
# wants to be called again. What it raises becomes the error of the graph. It must not refer to the graph, and must not
# change the arrays or keep them.
Observer = Callable[[Sequence[np.ndarray], str], bool]

_unclaimed: ContextVar[Observer | None] = ContextVar("mpistrat_observer", default=None)


@contextmanager
def observed(observer: Observer | None) -> Iterator[None]:
    """A context in which the first collective that is traced gets this observer."""
    token = _unclaimed.set(observer)
    try:
        yield
    finally:
        _unclaimed.reset(token)


def claim() -> Observer | None:
    """The observer of the collective that is being traced; None for all but the first in `observed`."""
    observer = _unclaimed.get()
    if observer is not None:
        _unclaimed.set(None)
    return observer
