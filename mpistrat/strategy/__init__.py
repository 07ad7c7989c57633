"""MPIStrategy: tf.distribute with one replica per rank, and Keras under it, in the package `keras`.

`mpistrat.tensorflow` has the public names of this package, by lazy attributes.
"""

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module

from ..core.errors import MissingDependencyError
from ..process.launch_env import launched_rank
from ..tensorflow.kerases import is_keras2_in_use
from .mpi_strategy import MPIStrategy, integrations
from .strategies import strategy

__all__ = ["MPIStrategy", "strategy"]

_logger = logging.getLogger(__name__)


def _adapt_keras(is_needed: bool) -> Callable[[], None]:
    """The function that adapts Keras to MPIStrategy; without Keras 3 it does nothing, unless it is needed.

    Keras 2 is adapted too, if the process has it by now.

    Raises:
        MissingDependencyError: It cannot adapt this version of Keras. Without it each rank would train a model of its
            own, and no error would say so.
    """
    if is_needed and is_keras2_in_use():
        raise MissingDependencyError('variables="sharded" divides the state of optimizers of Keras 3, and tf.keras is '
                                     'Keras 2 (TF_USE_LEGACY_KERAS). Take variables="mirrored", or Keras 3.')
    try:
        apply: Callable[[], None] = import_module("mpistrat.strategy.keras").apply
        if is_keras2_in_use() or "tf_keras" in sys.modules:
            import_module("mpistrat.strategy.keras.keras2")
    except MissingDependencyError as error:
        keras = sys.modules.get("keras")
        if is_needed or (keras is not None and not keras.__version__.startswith("2.")
                         and keras.backend.backend() == "tensorflow"):
            raise
        rank = launched_rank(os.environ)  # The strategy has not called init() yet.
        _logger.log(logging.DEBUG if rank else logging.INFO,
                    "rank %d: MPIStrategy is for custom training loops here: %s", rank, error)
        return lambda: None
    return apply


integrations.append(_adapt_keras)
