"""What MPIStrategy needs of Keras that is not public, in one place. There in Keras 3.10 to 3.15.

Importing this module fails where Keras has moved one of the names. It is imported when the first MPIStrategy is made,
and the rest of mpistrat.keras does without.
"""

import keras

from ...core.errors import MissingDependencyError


def unknown(what: object) -> MissingDependencyError:
    """The error for something of Keras that is not there."""
    return MissingDependencyError(f"MPIStrategy does not know Keras {keras.__version__}: {what}. It was run with Keras "
                                  "3.10 to 3.15. DistributedOptimizer works without what is missing.")


try:
    from keras.src.backend.tensorflow import trainer
    from keras.src.backend.tensorflow.core import Variable
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
    from keras.src.callbacks import BackupAndRestore, ModelCheckpoint, TensorBoard
    from keras.src.callbacks.callback_list import CallbackList
    from keras.src.callbacks.swap_ema_weights import SwapEMAWeights
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.models.model import Model
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.random.seed_generator import SeedGenerator
    from keras.src.saving import saving_lib
    from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
    from keras.src.utils import file_utils
except ImportError as _error:
    raise unknown(_error) from _error

__all__ = [
    "BackupAndRestore", "BaseOptimizer", "CallbackList", "GeneratorDataAdapter", "LossScaleOptimizer", "Model",
    "ModelCheckpoint", "SeedGenerator", "SwapEMAWeights", "TFOptimizer", "TensorBoard", "TensorFlowTrainer", "Variable",
    "file_utils", "legacy_h5_format", "saving_lib", "trainer", "unknown",
]
