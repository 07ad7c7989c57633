"""Keras' optimizers under MPIStrategy: each gets a subclass of its class that reduces gradients.

An optimizer gets this class when it is made in the scope, built for variables of the strategy, or applied in a replica.
The class has the mix-ins of DistributedOptimizer. Differences under a strategy: gradients are summed and weighted by
rows, variables belong to the strategy, and all ranks save. The strategy may divide the state among the ranks.

The functions run in a replica, in TensorFlow's thread, unless the docstring says otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from ...api import array_ops, runtime
from ...core.errors import InvalidRequestError, MismatchError
from ...core.request import Sum
from ...keras.bridge.compared import rates_of, require_equal_rates
from ...keras.bridge.patches import Function
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import parts_of, passes_on
from ...keras.bridge.training import StrategyTraining
from ...keras.clone import original_class
from ...keras.optimizers.optimizer import Applying, class_with
from ...keras.sharded.shard_state import OptimizerState
from ...keras.sharded.sharded_optimizer import Sharded, require_update_step
from ...tensorflow import files
from ...tensorflow.async_op.submission import Observer
from ...tensorflow.bridge.names import OptimizerName, eager
from ...tensorflow.bridge.types import OptionalGradient, Tensor, Variable
from ...tensorflow.consistency import FirstSteps, require_equal_weights
from ...tensorflow.gradients import GradientOptions, GradientReducer, indices_of, reduce_gradients
from ...tensorflow.graph.buckets import ReduceSpec
from ...tensorflow.kerases import calls_of
from ..mpi_strategy import MPIStrategy
from . import step_state
from .losses import tell_of_problem

# -- the gradients of the global batch, weighted by rows ---------------------------------------------------------------
# Keras sums the gradients over the ranks and expects each rank to have the same number of rows. If a global batch does
# not divide evenly (the last batch, or fewer rows than ranks), the sum is not the gradient of the global batch. So each
# rank's gradients are weighted by its number of rows. The row numbers are reduced together with the gradients, and if
# all ranks have the usual number nothing is multiplied.

_HALVES = (tf.float16, tf.bfloat16)
_OWN_ROWS = ("use strategy.experimental_distribute_dataset(dataset), or, in the function of "
             "distribute_datasets_from_function, dataset.shard(context.num_input_pipelines, context.input_pipeline_id)")
_OUTSIDE = ("optimizer.apply reduces the gradients of the ranks in a replica only. Call it in a function that you pass "
            "to strategy.run: strategy.run(step, args=(batch,)).")


class RowReducer(GradientReducer):
    """Sums an optimizer's gradients over the ranks of a strategy. Each rank's weight is its number of rows."""

    checks_weights = False  # fit or compare_in_loop compares the weights.
    is_compared = False  # Whether the ranks have compared the weights before the first step of a user-defined loop.
    is_global = True

    def __init__(self, strategy: MPIStrategy):
        super().__init__(OptimizerName(0), strategy.extended.gradient_options, Sum)
        self._bucket_bytes = strategy.extended.bucket_bytes()

    @cached_property
    def checks(self) -> FirstSteps:
        return FirstSteps(self.name, way_out=_OWN_ROWS)

    def _observer(self, *args: Any) -> Observer | None:
        # The observer finds ranks with the same data, and gradients that a replica has reduced are always the same.
        return None if tf.distribute.get_strategy().extended.replicas_reduce else super()._observer(*args)

    def require_no_strategy(self) -> None:
        """Do nothing: this reducer belongs to a strategy."""

    def reduce(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
               reduce_shared: Callable[..., list[Tensor]] = reduce_gradients) -> list[OptionalGradient]:
        if step_state.state.reducer is not self:  # Outside of a replica, or applied by another optimizer.
            return list(gradients)
        if not tf.distribute.get_strategy().extended.replicas_reduce:
            tell_of_problem(gradients, variables)
        weight = step_state.state.weight

        def weighted(gradients: Sequence[Tensor], spec: ReduceSpec, options: GradientOptions,
                     variables: Sequence[Variable]) -> list[Tensor]:
            spec = replace(spec, bucket_bytes=self._bucket_bytes)
            if weight is None or not gradients:
                return reduce_shared(gradients, spec, options, variables)
            *summed, total = reduce_shared(scaled_unless(weight == 1, gradients, weight), spec, options, variables,
                                           exact={"rows": weight})
            step_state.state.total = total
            size = tf.cast(self.process_set.size(), tf.float32)
            return scaled_unless(total == size, summed, size / total)

        return super().reduce(gradients, variables, weighted)

    def reduce_overwritten(self, gradients: Sequence[OptionalGradient], variables: Sequence[Variable],
                           places: Sequence[int]) -> list[OptionalGradient]:
        if step_state.state.reducer is not self:
            return list(gradients)
        rows = step_state.state.rows  # A rank without rows may have any gradient, also NaN.
        return super().reduce_overwritten(
            [tf.where(rows == 0, g.dtype.min, g) if rows is not None and g is not None and i in places else g
             for i, g in enumerate(gradients)], variables, places)

    def all_true(self, value: tf.Tensor, purpose: str) -> tf.Tensor:
        if step_state.strategy_here() is None:
            return value
        rows = step_state.state.rows  # Gradients without rows do not count.
        return super().all_true(value if rows is None else tf.logical_or(value, rows == 0), purpose)


def scaled_unless(is_one: tf.Tensor, gradients: Sequence[Tensor], factor: tf.Tensor) -> list[Tensor]:
    """Return the gradients times `factor`, or unchanged if `is_one`, because a branch is faster than a product."""
    # Only the values go through the branch: XLA would not know a shape that came out of it.
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    results = tf.cond(is_one, lambda: list(map(tf.identity, values)), lambda: [scaled(v, factor) for v in values])
    return [tf.IndexedSlices(result, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else result
            for g, result in zip(gradients, results, strict=True)]


def scaled(gradient: Tensor, factor: tf.Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    wide = tf.cast(gradient, tf.float32) if gradient.dtype in _HALVES else gradient
    # The gradient of a rank without rows may be anything, also NaN, and must not spoil the sum.
    return tf.cast(tf.math.multiply_no_nan(wide, tf.cast(factor, wide.dtype)), gradient.dtype)


def compare_in_loop(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Raise MismatchError if ranks begin a user-defined loop with different weights. Collective. Compares only once."""
    reducer: RowReducer = optimizer._mpistrat.reducer
    if step_state.state.rows is not None or reducer.is_compared:
        return
    reducer.is_compared = True
    if not runtime.current().settings.is_checked or runtime.current().topology.size == 1:
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        place, rates = f"in the first step of {optimizer.name}", rates_of(parts_of(optimizer))

        def compare_rates() -> None:
            require_equal_rates(array_ops.allgather_object(rates, eager("strategy/rates")), place)

        try:
            require_equal_weights(variables, eager("strategy/weights"), place, causes=StrategyTraining.causes,
                                  rates=(repr(rates).encode(), compare_rates))
        except MismatchError as error:
            error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph would raise a StagingError instead.
            raise


# -- the class of an optimizer -----------------------------------------------------------------------------------------


class UnderStrategy:
    """A mix-in for optimizers of a strategy. Of the base classes it is the first, so its methods have priority."""

    is_distributed = False  # Not by itself
    _mpistrat: OptimizerState
    _distribution_strategy: MPIStrategy

    def __init__(self, *args: object, **kwargs: object):
        # A program calls the class of an optimizer to make another optimizer. Keras forbids plain assignment so early.
        object.__setattr__(self, "__class__", original_class(type(self)))
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        strategy = self._distribution_strategy
        with tf.init_scope(), step_state.scope_of(strategy), strategy.extended.slots.created():
            super().build(variables)  # type: ignore[misc]

    def add_variable_from_reference(self, *args: object, **kwargs: object) -> keras.Variable:
        with step_state.scope_of(self._distribution_strategy):  # An optimizer may get this class while it is built.
            return super().add_variable_from_reference(*args, **kwargs)  # type: ignore[misc]

    def _mpistrat_apply(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                        variables: list[keras.Variable]) -> tf.Tensor | None:
        slots, state = self._distribution_strategy.extended.slots, step_state.state
        if step_state.strategy_here() is None or state.reducer is not None:  # An outer optimizer has reduced.
            if slots.are_sharded:
                raise InvalidRequestError(f"{slots.option}: {_OUTSIDE}")
            # The first call in eager code may be there to make the slots.
            if state.reducer is None and runtime.current().topology.size > 1 and (
                    not tf.executing_eagerly() or calls_of(self)):  # type: ignore[arg-type]
                step_state.warn(f"{_OUTSIDE} Unless the script averages them, each rank trains a model of its own.")
            return original_class(type(self)).apply(self, grads, given)
        compare_in_loop(self, variables)
        state.reducer = self._mpistrat.reducer
        try:
            return super()._mpistrat_apply(grads, given, variables)  # type: ignore[misc]
        finally:
            state.reducer = None

    def _mpistrat_apply_accumulated(self, grads: list[OptionalGradient], given: list[keras.Variable] | None,
                                    variables: list[keras.Variable]) -> tf.Tensor | None:
        state, weight, overwritten = step_state.state, step_state.state.weight, indices_of(variables)
        if weight is not None:
            # The sum of several steps' gradients has no single number of rows.
            factor, state.weight = step_state.share(), None
            grads = [gradient if gradient is None or i in overwritten else scaled(gradient, factor)
                     for i, gradient in enumerate(grads)]
        try:
            return super()._mpistrat_apply_accumulated(grads, given, variables)  # type: ignore[misc]
        finally:
            state.weight = weight

    def _all_reduce_sum_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, tf.Variable]]
                                  ) -> list[tuple[OptionalGradient, tf.Variable]]:
        return list(grads_and_vars)

    def _track_variable(self, variable: keras.Variable) -> None:
        if self._mpistrat.whole is not None:  # Before tracking, which may restore a checkpoint.
            vars(variable).update(self._mpistrat.whole.checkpointed(variable))
        super()._track_variable(variable)  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], **arguments: object) -> Optimizer:
        """Make an optimizer of the original class. In the scope of a strategy it gets the mix-ins again."""
        return original_class(cls).from_config(config, **arguments)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Let pickle and copy use the original class, because they look a class up by its name."""
        how: Any = super().__reduce_ex__(protocol)
        load, *rest = how
        return getattr(original_class(load.__self__), load.__name__), *rest


def adopt(optimizer: Optimizer, strategy: tf.distribute.Strategy | None) -> bool:
    """Give an optimizer the class that reduces gradients, if the strategy is an MPIStrategy. Local.

    Return whether the optimizer got the class in this call. An optimizer that has inner optimizers does not get it.

    Raises InvalidRequestError: The strategy divides states, but the optimizer has no update_step, or is already built.
    """
    cls = type(optimizer)
    if not isinstance(strategy, MPIStrategy) or hasattr(cls, "is_distributed") or passes_on(optimizer):
        return False
    slots = strategy.extended.slots
    if slots.are_sharded:
        require_update_step(cls)
        if optimizer.built:
            raise InvalidRequestError(f"{cls.__name__} was built outside of strategy.scope(), so every rank has the "
                                      f"whole state. With {slots.option}, create the optimizer in the scope.")
    strategy.extended.assigned_in_lockstep(optimizer._iterations.value)
    vars(optimizer).update(_mpistrat=OptimizerState(cls.__name__, RowReducer(strategy), owner=slots.owner),
                           _distribution_strategy=strategy)
    optimizer.__class__ = class_with((UnderStrategy, *((Sharded,) if slots.are_sharded else ()), Applying), cls)
    return True


@replaces(Optimizer, "__init__", "each rank would apply its own gradients, with slots on every rank",
          "tf.distribute.get_strategy()")
def make(original: Function, self: Optimizer, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    # An optimizer without an update_step may get inner optimizers later.
    if not files.in_alone() and type(self).update_step is not Optimizer.update_step:
        adopt(self, tf.distribute.get_strategy())


@replaces(Optimizer, "build", "an optimizer made outside of the scope could not make its slots",
          "self._trainable_variables = variables[:]")
def build(original: Function, self: Optimizer, variables: Sequence[keras.Variable | tf.Variable]) -> None:
    if not hasattr(type(self), "is_distributed") and variables:
        first = variables[0].value if isinstance(variables[0], keras.Variable) else variables[0]
        strategy = getattr(first, "_distribute_strategy", None)
        # Divided slots are made for parts of the variables, so the optimizer needs its class from the beginning.
        if isinstance(strategy, MPIStrategy) and not strategy.extended.slots.are_sharded:
            adopt(self, strategy)
    original(self, variables)


@replaces(Optimizer, "apply", "each rank would apply its own gradients",
          "self._backend_apply_gradients(grads, trainable_variables)")
def apply(original: Function, self: Optimizer, grads: Iterable[OptionalGradient],
          trainable_variables: Iterable[keras.Variable] | None = None) -> tf.Tensor | None:
    if not adopt(self, step_state.strategy_here()):
        return original(self, grads, trainable_variables)
    cls = original_class(type(self))
    if cls.apply is not Optimizer.apply:
        raise InvalidRequestError(f"{cls.__name__} defines its own apply(), so it must be created in strategy.scope() "
                                  "and have an update_step().")
    return self.apply(grads, trainable_variables)
