"""Keras under MPIStrategy: the functions of Keras that are replaced, ordered by Keras' concepts.

trainer: fit, evaluate, predict, and the random seeds of layers. losses: what each rank's loss counts by. optimizer:
reduction, clipping and loss scaling; gradients: those of uneven batches; sharded: the optimizers of variables="sharded"
and "central". empty_parts: evaluate and predict without rows. callbacks: which callbacks run where. saving: files of
models. step_state has what they share while a step is traced. keras2 is for Keras 2 alone.

`mpistrat.strategy` imports this package when the first strategy is created, then calls `apply`. The import raises
MissingDependencyError where Keras is too old.
"""

import keras

from ...core.errors import MissingDependencyError
from ...core.install import pip

# With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):
    raise MissingDependencyError(f"MPIStrategy needs Keras 3.10 or later, and this is {keras.__version__} "
                                 f"({pip('keras>=3.10')}).")

from ...keras.bridge import patches
from ...keras.bridge.patches import PATCHES, undo
from . import adopted_callbacks, losses, optimizer, saving, step_state, trainer  # noqa: F401

__all__ = ["PATCHES", "apply", "undo"]


def apply() -> None:
    """Replace the functions, once."""
    patches.apply(for_strategy=True)
