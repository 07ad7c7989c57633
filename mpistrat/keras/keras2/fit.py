"""Replaces fit of Keras 2 (tf_keras) by the same function that replaces fit of Keras 3.

Applied with the first DistributedOptimizer of an optimizer of Keras 2.
"""

import tf_keras

from ..bridge.patches import replaces
from ..fit import fit_callbacks

replaces(tf_keras.Model, "fit", "the ranks would not be compared, nor their running statistics averaged",
         "callbacks.on_train_begin()")(fit_callbacks.fit)
