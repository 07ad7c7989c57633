"""DiLoCo: the ranks train by themselves, and an outer optimizer takes their average progress as its gradient.

For users. A callback of fit, and an object for loops; collective.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...core.errors import InvalidRequestError
from ...core.request import Average, ScaledOp
from ...tensorflow.bridge.reduce_spec import ReduceSpec
from ...tensorflow.compression import Compression, Compressor, require_compression
from ...tensorflow.gradients import label_of
from ...tensorflow.list_ops import reduce_tensors
from .._private import Logs
from ..fit.training import optimizers_of
from ..nested_optimizers import distributed_in
from .averaging import PeriodicAveraging, assign_means
from .local_training import LocalTraining
from .scope import Scope


class DiLoCo(PeriodicAveraging):
    """Has each rank train by itself, and every so many steps makes an outer step with the average progress. Collective.

    DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): the outer gradient is the mean over the ranks of the
    weights at the last outer step less those now. The outer optimizer changes the former by it, and all ranks go on
    from there. The inner optimizer, that of `compile`, is AdamW in the paper; it is not distributed.

        model.compile(keras.optimizers.AdamW(4e-4), ...)
        model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.DiLoCo(every=50)])

    All else is as with LocalSGD: when the ranks synchronise, which is an outer step each time, loops of your own, what
    is averaged, and the errors. It takes the memory of the weights twice more, in place: the weights at the last outer
    step, and the momentum of the outer optimizer.

    Args:
        every: The steps between two outer steps, as in LocalSGD.
        outer: A Keras optimizer, which this object keeps; default: SGD(0.7, momentum=0.9, nesterov=True).
        compression: One of Compression, for the progress that is averaged. What int8 rounds off between hosts is added
            to the progress of the next round.
        scope, average_slots, uneven: As for LocalSGD.

    Raises:
        ValueError: As LocalSGD, or `outer` is no Keras optimizer, is distributed, scales the loss, or is the optimizer
            of the model, or `compression` is none.
    """

    def __init__(self, every: int, outer: Optimizer | None = None, scope: Scope = None, average_slots: bool = False,
                 uneven: str = "error", compression: type[Compressor] = Compression.none):
        if outer is None:
            outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        if not isinstance(outer, Optimizer) or isinstance(outer, LossScaleOptimizer):
            raise InvalidRequestError("DiLoCo(outer=) is a Keras optimizer, for example keras.optimizers.SGD(0.7, "
                                      f"momentum=0.9, nesterov=True). Received: {outer!r}")
        if distributed_in(outer):
            raise InvalidRequestError("DiLoCo(outer=) gets the average of all ranks already: give it "
                                      f"keras.optimizers.{type(outer).__name__}(...) itself, which is not distributed.")
        require_compression(compression)
        self.outer, self.compression = (outer,), compression
        self._point: list[keras.Variable] = []  # the weights at the last outer step
        self._has_point = False
        super().__init__(every, 0, scope, average_slots, uneven)

    def _settings(self) -> dict[str, object]:
        outer, = self.outer
        arguments = {name: value for name, value in outer.get_config().items() if value and name != "name"}
        return {**super()._settings(), "compression": self.compression.__name__,
                "outer": f"{type(outer).__name__}({arguments})"}

    @property
    def variables(self) -> list[keras.Variable]:
        return [*super().variables, *self.outer[0].variables]

    def prepare(self, model: keras.Model) -> None:
        self._build(LocalTraining(model, self).weights)

    def _build(self, weights: Sequence[keras.Variable]) -> None:
        """Make the state for these weights. Local.

        Raises:
            InvalidRequestError: It has been made for others.
        """
        outer, = self.outer
        if not self._point:
            self._point = [keras.Variable(tf.convert_to_tensor(v), dtype=v.dtype, name=v.name) for v in weights]
            outer.build(self._point)
        if [(p.shape, p.dtype) for p in self._point] != [(v.shape, v.dtype) for v in weights]:
            raise InvalidRequestError("the model has other trainable weights than when this DiLoCo began, and its "
                                      "state is for those. Make a new one: hvd.callbacks.DiLoCo(...).")

    def enter(self, training: LocalTraining) -> None:
        if any(optimizer is self.outer[0] for optimizer in optimizers_of(training.model)):
            raise InvalidRequestError("DiLoCo(outer=) is the optimizer of the model too. Give each an optimizer of its "
                                      "own.")
        super().enter(training)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._has_point = False  # Callbacks may have assigned weights.

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        training = self._begun
        if not self._has_point and training.weights:
            if self.steps_apart:  # The first batch has made the weights.
                assign_means(training.weights, f"{training.name}/weights")
            self._remember()

    def _remember(self) -> None:
        weights = self._begun.weights
        self._build(weights)
        for point, weight in zip(self._point, weights, strict=True):
            point.assign(weight)
        self._has_point = True

    def _forget(self) -> None:
        super()._forget()
        self._has_point = False

    def _average(self, training: LocalTraining) -> None:
        if not self._has_point:  # The first batches have made the weights.
            return assign_means(training.weights, f"{training.name}/weights")
        progress = [tf.convert_to_tensor(p) - tf.convert_to_tensor(w)
                    for p, w in zip(self._point, training.weights, strict=True)]
        spec = ReduceSpec(f"{training.name}/progress", ScaledOp(Average), [label_of(v) for v in training.weights])
        self.outer[0].apply(reduce_tensors(progress, spec, self.compression), self._point)
        for point, weight in zip(self._point, training.weights, strict=True):
            weight.assign(point)
        assign_means(training.slots, f"{training.name}/slots")
