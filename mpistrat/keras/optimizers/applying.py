"""The averaging of gradients in an optimizer of Keras 3. For Keras 2 see mpistrat/keras/keras2/applying.py.

Keras calls these methods. Collective.
"""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from ...core.errors import InvalidRequestError, MissingDependencyError
from ...tensorflow.bridge.types import OptionalGradient
from ...tensorflow.gradients import indices_of
from ..bridge.private_names import trained_by
from ..clone import original_class
from ..sharded.optimizer_state import OptimizerState

# Private methods that Keras calls while it applies gradients. These methods reduce accumulated gradients.
_HOOKS = ("_backend_apply_gradients", "_clip_gradients")
_CLIPS_BEFORE = "this Keras clips gradients before it accumulates them"


class Applying:
    """A mix-in before a Keras optimizer's class that reduces gradients before Keras uses them.

    With gradient accumulation it reduces the sum over the steps once per update, not the gradient of each step.
    With and without accumulation Keras clips after the reduction, so Keras clips the averaged gradient.
    """

    _mpistrat: OptimizerState

    def apply(self, grads: Iterable[OptionalGradient],
              trainable_variables: Iterable[keras.Variable] | None = None) -> tf.Tensor | None:
        """Average the gradients over the ranks, and call the original class' apply with the averages. Collective.

        Raises:
            MissingDependencyError: Gradients are accumulated, and this Keras does not call the hooks that average them.
            ValueError: There are more or fewer variables than gradients.
        """
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)  # It may be an iterator.
        variables = trained_by(self) if given is None else given
        if len(grads) != len(variables):
            if given is None:
                return super().apply(grads)  # type: ignore[misc]  # Keras raises the error.
            raise InvalidRequestError(f"apply() has {len(grads)} gradients for {len(given)} variables.")
        return self._mpistrat_apply(grads, given, variables) if grads else super().apply(grads, given)  # type: ignore[misc]

    def _mpistrat_apply(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                        variables: list[keras.Variable]) -> tf.Tensor | None:
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            return self._mpistrat_apply_accumulated(grads, given, variables)
        return super().apply(self._mpistrat.reducer.reduce(grads, variables), given)  # type: ignore[misc]

    def _mpistrat_apply_accumulated(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                                    variables: list[keras.Variable]) -> tf.Tensor | None:
        self._mpistrat.reducer.require_no_strategy()
        # Keras assigns some gradients to their variables directly, without a hook.
        overwritten = indices_of(variables)
        grads = self._mpistrat.reducer.reduce_overwritten(grads, variables, overwritten)
        if self._mpistrat.called.issuperset(_HOOKS):
            return super().apply(grads, given)  # type: ignore[misc]
        require_hooks(type(self))
        expected = set(_HOOKS) if any(gradient is not None and i not in overwritten
                                      for i, gradient in enumerate(grads)) else set()
        steps = self.gradient_accumulation_steps  # type: ignore[attr-defined]
        if tf.executing_eagerly() and (int(self._iterations) + 1) % steps:  # type: ignore[attr-defined]
            expected.discard("_clip_gradients")  # This step is no update. In a graph Keras traces both branches.
        result = super().apply(grads, given)  # type: ignore[misc]
        if not expected <= self._mpistrat.called:
            raise _unknown(f"{type(self).__name__}.apply did not call "
                           f"{', '.join(sorted(expected - self._mpistrat.called))}")
        return result

    def _backend_apply_gradients(self, grads: Sequence[OptionalGradient],
                                 trainable_variables: Sequence[keras.Variable]) -> None:
        # Keras calls this from apply. Keras' method calls _clip_gradients, only in the branch of the update.
        self._mpistrat.called.add("_backend_apply_gradients")
        if self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            self._mpistrat.accumulating = list(trainable_variables)
        try:
            return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]
        finally:
            self._mpistrat.accumulating = None

    def _all_reduce_sum_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]]
                                  ) -> list[tuple[OptionalGradient, tf.Variable]]:
        # Without a strategy Keras' method changes nothing. But the method has a custom gradient, and TensorFlow keeps
        # the graph of the train step for that gradient until the process ends.
        if tf.distribute.has_strategy():
            return super()._all_reduce_sum_gradients(grads_and_vars)  # type: ignore[misc]
        return list(grads_and_vars)

    def _clip_gradients(self, grads: list[OptionalGradient]) -> list[OptionalGradient]:
        own = self._mpistrat
        own.called.add("_clip_gradients")
        if own.accumulating is not None:
            grads = own.reducer.reduce(grads, own.accumulating)
            if own.factor != 1.0:
                grads = [g if g is None else g * tf.cast(own.factor, g.dtype) for g in grads]
        elif self.gradient_accumulation_steps:  # type: ignore[attr-defined]
            raise _unknown(_CLIPS_BEFORE)
        return super()._clip_gradients(grads)  # type: ignore[misc]


def require_hooks(cls: type) -> None:
    """Raise MissingDependencyError if a class of optimizers lacks the hooks that average accumulated gradients."""
    # The mix-ins of a distributed class define the hooks in any case.
    missing = [name for name in _HOOKS if not hasattr(original_class(cls), name)]
    if missing:
        raise _unknown(f"{cls.__name__} has no {', '.join(missing)}")
    if keras.__version__.startswith(("3.0.", "3.1.", "3.2.", "3.3.", "3.4.")):
        raise _unknown(_CLIPS_BEFORE)


def _unknown(what: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"DistributedOptimizer cannot average accumulated gradients with Keras {keras.__version__}: {what}. Leave out "
        "backward_passes_per_step and gradient_accumulation_steps, or install "
        "Keras 3.5 or 3.15, with which averaging was tested.")
