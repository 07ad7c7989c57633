"""MPIStrategy: tf.distribute with one replica per rank. The subpackage `keras` adapts Keras to MPIStrategy.

`mpistrat.tensorflow` exports the public names of this package as lazy attributes.
"""

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module

from ..core.errors import MissingDependencyError
from ..process.launch_env import launched_rank
from ..tensorflow.kerases import is_keras2_in_use
from .mpi_strategy import MPIStrategy, integrations, strategy

__all__ = ["MPIStrategy", "strategy"]

_logger = logging.getLogger(__name__)


def _adapt_keras(is_needed: bool) -> Callable[[], None]:
    """Return the function that adapts Keras to MPIStrategy. The function does nothing if Keras 3 is missing.

    Keras 2 (tf_keras) is adapted too, if the process has already imported it.

    Raises MissingDependencyError: This version of Keras 3 cannot be adapted, or `is_needed` and Keras 3 is missing or
    not in use. Without the error each rank would silently train a separate model.
    """
    if is_needed and is_keras2_in_use():
        raise MissingDependencyError('variables="sharded" and "central" need Keras 3, but tf.keras is Keras 2 '
                                     '(TF_USE_LEGACY_KERAS). Write variables="mirrored", or unset TF_USE_LEGACY_KERAS.')
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
                    "rank %d: MPIStrategy works here only in custom training loops, not with fit: %s", rank, error)
        return lambda: None
    return apply


integrations.append(_adapt_keras)
