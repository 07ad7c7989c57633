"""Keras under MPIStrategy: replacements of functions of Keras, in one module for each topic.

trainer: fit, evaluate, predict, random seeds of layers, and files of models. losses: the weight of each rank's loss.
optimizer: reduction of gradients, weights of uneven batches, and divided state. step_state: the state that these
modules share while TensorFlow traces a step. keras2: Keras 2 only.

`mpistrat.strategy` imports this package when the first strategy is created, then calls `apply`. The import raises
MissingDependencyError if Keras is too old.
"""

import keras

from ...core.errors import MissingDependencyError
from ...core.install import pip

# With Keras 3.7 and 3.8 the numbers of `fit` are wrong, and 3.9 fails.
if tuple(map(int, keras.__version__.split(".")[:2])) < (3, 10):
    raise MissingDependencyError(f"MPIStrategy needs Keras 3.10 or later ({pip('keras>=3.10')}). "
                                 f"Received: {keras.__version__}")

from ...keras.bridge import patches
from ...keras.bridge.patches import PATCHES, undo
from . import losses, optimizer, step_state, trainer  # noqa: F401

__all__ = ["PATCHES", "apply", "undo"]


def apply() -> None:
    """Replace the functions of Keras. Later calls do nothing."""
    patches.apply(for_strategy=True)
