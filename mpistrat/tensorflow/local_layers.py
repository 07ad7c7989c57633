"""The argument `local_layers` of Horovod's Partial wrappers: layers whose gradients each rank keeps for itself.

Called by the Partial wrappers; local.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..core.errors import InvalidRequestError
from .types import Variable


class Layer(Protocol):
    """What is needed of a Keras layer."""

    built: bool
    weights: list[Any]


def register_local_layers(layers: Layer | Sequence[Layer] | None, register: Callable[[Variable], None]) -> None:
    """Call `register` with each weight of the layers, their running statistics included. Local.

    Raises:
        InvalidRequestError: `layers` is neither a layer nor a list of layers, or a layer has no weights yet.
    """
    listed: list[Any] = list(layers) if isinstance(layers, list | tuple) else [] if layers is None else [layers]
    for layer in listed:
        if not hasattr(layer, "weights"):
            raise InvalidRequestError("local_layers is a Keras layer or a list of layers. Received: "
                                      f"{layer!r}")
        if not layer.built:
            raise InvalidRequestError(f"local_layers: {getattr(layer, 'name', layer)} has no weights yet. Build the "
                                      "model first: give it an Input layer, or call it once.")
        for weight in layer.weights:
            register(weight)
            register(weight.value)  # The tf.Variable of a Keras variable; a tape may have either as a source.
