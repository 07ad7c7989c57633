"""Keras under MPIStrategy: the functions of Keras that are replaced, ordered by Keras' concepts.

trainer: fit, evaluate, predict, and the random seeds of layers. optimizer: gradients, clipping, loss scaling, and the
slots of variables="central". callbacks: which callbacks run where. saving: files of models. step_state has what they
share while a step is traced.

MPIStrategy imports this package when the first strategy is created, then calls `apply`. The import raises
MissingDependencyError where Keras is too old.
"""

from .._private import require_for_strategy

require_for_strategy()

from .. import patches  # noqa: E402
from ..patches import PATCHES, undo  # noqa: E402
from . import callbacks, optimizer, saving, step_state, trainer  # noqa: E402, F401

__all__ = ["PATCHES", "apply", "undo"]


def apply() -> None:
    """Replace the functions, once. Raises MissingDependencyError where Keras is too old."""
    require_for_strategy()
    patches.apply(for_strategy=True)
