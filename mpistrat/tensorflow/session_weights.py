"""The values of variables in a session, for the check that the ranks train the same weights (see consistency.py).

A callback in a graph cannot read a variable of a session. So the weights are read before a run, by another run.
"""

import weakref
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from .async_op.submission import Observer
from .bridge.types import Variable
from .digests import digest_of


class SessionWeights:
    """The digests of variables before the latest run."""

    def __init__(self) -> None:
        self._latest: list[bytes] = []

    def read(self, session: tf.compat.v1.Session, variables: Sequence[Variable]) -> None:
        """Read the variables in a session, before a run. Variables without a value have no digests."""
        self._latest = []
        try:
            values = session.run(list(variables))
        except tf.errors.FailedPreconditionError:
            return
        self._latest = [digest_of(np.asarray(value)) for value in values]

    def digests(self, variables: Sequence[Variable]) -> list[bytes]:
        """The digests of the variables, which `read` has read; [] if they had no values."""
        return self._latest


class ReadingObserver:
    """An observer of a collective (see submission.Observer) for which variables are read before each run.

    Args:
        observer: Called with the arrays.
        weights: Reads the variables.
    """

    def __init__(self, observer: Observer, weights: SessionWeights, variables: Sequence[Variable]):
        self._observer, self._weights = observer, weights
        self._variables = list(map(weakref.ref, variables))  # They have the graph, which keeps this.

    def before_run(self, session: tf.compat.v1.Session) -> None:
        """Called before a run with the collective."""
        found = [variable for variable in (reference() for reference in self._variables) if variable is not None]
        self._weights.read(session, found)

    def __call__(self, arrays: Sequence[np.ndarray], thread: str) -> bool:
        return self._observer(arrays, thread)
