"""What to write in place of an optimizer of Keras 2 or of TensorFlow 1, which DistributedOptimizer does not take.

DistributedOptimizer appends the advice to its error. Local.
"""

import tensorflow as tf

_TAPE = "or average its gradients with mpistrat.tensorflow.DistributedGradientTape."


def advice(optimizer: object) -> str:
    """The end of the sentence on a wrong optimizer: what to write in its place; "" if it is no old optimizer. Local."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    # By the module's name, because tf_keras need not be installed.
    if any(base.__module__.partition(".")[0] == "tf_keras" for base in cls.__mro__):
        return (", which is an optimizer of Keras 2: unset TF_USE_LEGACY_KERAS and take the optimizer and the model "
                f"from `import keras`, {_TAPE}")
    if issubclass(cls, tf.compat.v1.train.Optimizer):
        return f", which is an optimizer of TensorFlow 1: take one of keras.optimizers for a Keras model, {_TAPE}"
    return ""
