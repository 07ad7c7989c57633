"""Keras under MPIStrategy: the functions of Keras that are replaced, ordered by Keras' concepts.

trainer: fit, evaluate, predict, and the random seeds of layers. optimizer: gradients, clipping, loss scaling, and the
slots of variables="central". callbacks: which callbacks run where. saving: files of models. step_state has what they
share while a step is traced.

MPIStrategy imports this package when the first strategy is created, then calls `apply`. The import raises
MissingDependencyError where Keras is too old.
"""

import keras

from ...core.errors import MissingDependencyError
from ...core.install import pip


def _require_keras() -> None:
    # With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
    if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):
        raise MissingDependencyError(f"MPIStrategy needs Keras 3.10 or later, and this is {keras.__version__} "
                                     f"({pip('keras>=3.10')}).")


_require_keras()

from .. import patches  # noqa: E402
from ..patches import PATCHES, undo  # noqa: E402
from . import callbacks, optimizer, saving, step_state, trainer  # noqa: E402, F401

__all__ = ["PATCHES", "apply", "undo"]


def apply() -> None:
    """Replace the functions, once. Raises MissingDependencyError where Keras is too old."""
    _require_keras()
    patches.apply(for_strategy=True)
