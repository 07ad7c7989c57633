"""Mix-ins that average gradients in optimizers of Keras 2, and the replacement of fit of Keras 2. Collective.

Keras calls the methods. An optimizer of Keras 2 aggregates gradients in a separate method, before it clips them. After
this aggregation a LossScaleOptimizer looks for gradients that are not finite, so all ranks find the same.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tf_keras

from ...core.errors import InvalidRequestError
from ...tensorflow.bridge.types import OptionalGradient
from ..bridge.patches import replaces
from ..bridge.private_names import passes_on
from ..fit import fit_callbacks
from ..sharded.shard_state import OptimizerState

# Applied with the first DistributedOptimizer of an optimizer of Keras 2, which imports this module.
replaces(tf_keras.Model, "fit", "the ranks would not be compared, nor their running statistics averaged",
         "callbacks.on_train_begin()")(fit_callbacks.fit)

Pairs = list[tuple[OptionalGradient, tf.Variable]]


def applying_of(original: type) -> type:
    """Return the mix-in for an optimizer class. Raises InvalidRequestError if the class has no aggregation method."""
    if passes_on(original):
        return ApplyingScaled
    if hasattr(original, "aggregate_gradients"):
        return Applying
    if hasattr(original, "_aggregate_gradients"):
        return ApplyingLegacy
    raise InvalidRequestError(f"DistributedOptimizer takes optimizers of tf_keras.optimizers and of "
                              f"tf_keras.optimizers.legacy. Received one of the class {original.__qualname__}.")


class _Accumulating:
    """A mix-in that sums the gradients of several passes, and applies the sum in the last pass.

    In the other passes the optimizer counts no step, so schedules and Adam's corrections follow the number of updates.
    """

    _mpistrat: OptimizerState
    gradient_accumulation_steps: int
    iterations: tf.Variable

    def apply_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]], *args: object,
                        **kwargs: object) -> Any:
        """Add up the gradients. In the last pass apply the sum, averaged over the ranks. Collective in that pass."""
        if self.gradient_accumulation_steps < 2:
            return super().apply_gradients(grads_and_vars, *args, **kwargs)  # type: ignore[misc]
        pairs = list(grads_and_vars)
        passes, sums = self._mpistrat_sums(pairs)
        for (gradient, _), total in zip(pairs, sums, strict=True):
            if total is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        passes.assign_add(1)
        is_last = tf.equal(passes % self.gradient_accumulation_steps, 0)

        def update() -> tf.Tensor:
            assert self._mpistrat.arguments is not None
            factor = self._mpistrat.arguments.factor / self.gradient_accumulation_steps
            gradients = [total if total is None else total * tf.cast(factor, total.dtype) for total in sums]
            self._mpistrat.accumulating = [variable for _, variable in pairs]
            try:
                super(_Accumulating, self).apply_gradients(  # type: ignore[misc]
                    list(zip(gradients, self._mpistrat.accumulating, strict=True)), *args, **kwargs)
            finally:
                self._mpistrat.accumulating = None
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            return tf.constant(True)

        if tf.executing_eagerly():
            if is_last:
                update()
        else:
            tf.cond(is_last, update, lambda: tf.constant(False))
        return self.iterations

    def _mpistrat_sums(self, pairs: Pairs) -> tuple[tf.Variable, list[tf.Variable | None]]:
        """Return the variable that counts the passes, and for each gradient the variable of its sum, or None."""
        own = vars(self)  # Keras would save variables in plain attributes.
        if "_mpistrat_passes" not in own:
            with tf.init_scope():
                own["_mpistrat_passes"] = tf.Variable(0, dtype=tf.int64, trainable=False)
                own["_mpistrat_sums_of"] = {}
        sums = own["_mpistrat_sums_of"]
        for gradient, variable in pairs:
            if gradient is not None and variable.ref() not in sums:
                with tf.init_scope():
                    sums[variable.ref()] = tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                own["_accumulated_gradients"].append(sums[variable.ref()])
        return own["_mpistrat_passes"], [None if gradient is None else sums[v.ref()] for gradient, v in pairs]

    def _mpistrat_averaged(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]]) -> Pairs:
        pairs = list(grads_and_vars)
        if self.gradient_accumulation_steps > 1 and self._mpistrat.accumulating is None:
            raise InvalidRequestError("backward_passes_per_step does not work in a LossScaleOptimizer of Keras 2, in "
                                      "which mixed_float16 wraps the optimizer. Leave out backward_passes_per_step, or "
                                      "train in mixed_bfloat16 or float32.")
        variables = [variable for _, variable in pairs]
        vars(self)["_trainable_variables"] = variables
        return list(zip(self._mpistrat.reducer.reduce([gradient for gradient, _ in pairs], variables), variables,
                        strict=True))


class Applying(_Accumulating):
    """The mix-in for optimizers of tf_keras.optimizers."""

    def aggregate_gradients(self, grads_and_vars: Pairs) -> Pairs:
        pairs = self._mpistrat_averaged(grads_and_vars)
        return super().aggregate_gradients(pairs) if tf.distribute.has_strategy() else pairs  # type: ignore[misc]


class ApplyingLegacy(_Accumulating):
    """The mix-in for optimizers of tf_keras.optimizers.legacy."""

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> Pairs:
        pairs = self._mpistrat_averaged(grads_and_vars)
        return super()._aggregate_gradients(pairs) if tf.distribute.has_strategy() else pairs  # type: ignore[misc]


class ApplyingScaled(_Accumulating):
    """The mix-in for a LossScaleOptimizer, which itself does not accumulate gradients."""

    def apply_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]], *args: object,
                        **kwargs: object) -> Any:
        """Average the gradients over the ranks, and call the original class' apply_gradients. Collective."""
        return super().apply_gradients(self._mpistrat_averaged(grads_and_vars), *args, **kwargs)
