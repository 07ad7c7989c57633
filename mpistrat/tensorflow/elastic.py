"""Horovod's elastic API for TensorFlow: states with variables.

    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

The number of ranks is fixed while a job runs. For users. `sync` is collective.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ..api import absent
from ..api.elastic import ObjectState, run
from ..api.elastic_sampler import ElasticSampler
from .ops import broadcast_variables
from .types import Variable

__all__ = ["ElasticSampler", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "run"]

__getattr__ = absent.explain(__name__)


class TensorFlowState(ObjectState):
    """Variables and Python objects that are the state of a training script.

    Args:
        variables: tf.Variables or Keras variables, the same ones in the same order on all ranks.
        session: Accepted for compatibility with Horovod, ignored.
        kwargs: Python objects, see ObjectState.

    Raises:
        ValueError: There are no variables.
    """

    def __init__(self, variables: Sequence[Variable] | None = None, session: object = None, **kwargs: Any):
        if not variables:
            raise ValueError("TensorFlowState needs a list of variables, since TensorFlow 2 has no collection of all: "
                             "TensorFlowState([*model.variables, *optimizer.variables], epoch=0)")
        self._variables = list(variables)
        self._values: list[np.ndarray] = []
        super().__init__(**kwargs)

    def save(self) -> None:
        """Keep copies of the variables and objects in memory. Local."""
        self._values = [np.array(tf.convert_to_tensor(variable).numpy()) for variable in self._variables]
        super().save()

    def restore(self) -> None:
        """Return to the values of the last save or commit. Local."""
        for variable, value in zip(self._variables, self._values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self) -> None:
        """Make the variables and objects of all ranks those of rank 0, and save them. Collective."""
        broadcast_variables(self._variables, 0)
        super().sync()


class TensorFlowKerasState(TensorFlowState):
    """A Keras model, its optimizer, and Python objects that are the state of a training script.

    Args:
        model: A model that has its weights already.
        optimizer: Default: the one that the model was compiled with. Its variables are created if they do not exist.
        backend: Accepted for compatibility with Horovod, ignored.
        kwargs: Python objects, see ObjectState.

    Raises:
        ValueError: The model has no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **kwargs: Any):
        if not model.built or not model.weights:
            raise ValueError("the model has no weights yet. Call model.build(input_shape), or give it an Input layer, "
                             "before its state is made.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__([*model.weights, *(self.optimizer.variables if self.optimizer is not None else ())], **kwargs)
