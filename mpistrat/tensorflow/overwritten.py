"""Variables that their "gradient" overwrites: all ranks get the largest value, which is neither averaged nor scaled.

The gradient of such a variable is not a gradient: a layer computes the variable's next value in its backward pass, and
Keras' optimizers assign it. Keras' float8 keeps the largest absolute values of inputs, kernels and output gradients in
variables of this kind, and the scales that follow from them. Keras takes the maximum where it accumulates gradients,
and a process with the rows of all ranks would have the maximum over all rows. Keras 3.10 to 3.15 use such variables for
nothing else.
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from .bridge.types import OptionalGradient, Variable


def indices_of(variables: Sequence[Variable]) -> list[int]:
    """The indices of the variables with overwrite_with_gradient. Local."""
    return [i for i, variable in enumerate(variables) if getattr(variable, "overwrite_with_gradient", False)]


def with_largest(gradients: Sequence[OptionalGradient], variables: Sequence[Variable], indices: Sequence[int],
                 reduce: Callable[[list[tf.Tensor], list[Variable]], list[tf.Tensor]]) -> list[OptionalGradient]:
    """The gradients, with the largest values of all ranks at `indices`. None stays None. Collective if any is not None.

    `reduce` gets tensors and their variables (for the names), and returns the maxima of the tensors over the ranks.
    """
    results = list(gradients)
    present = [i for i in indices if gradients[i] is not None]
    if present:
        largest = reduce([tf.convert_to_tensor(gradients[i]) for i in present], [variables[i] for i in present])
        for i, value in zip(present, largest, strict=True):
            results[i] = value
    return results
