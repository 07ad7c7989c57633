"""Keras' trainer under MPIStrategy: fit, evaluate and predict, logs, random seeds of layers, and files of models.

The replacements of methods of Model run outside of a replica, in the program's thread. The step function and the
functions that it calls (reduce_per_replica, the seeds) run while TensorFlow traces the step.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import keras
import tensorflow as tf
from keras.callbacks import CallbackList
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

from ...api import array_ops, runtime
from ...core.errors import MpistratError
from ...core.request import Max
from ...keras.bridge.measures import rows_of
from ...keras.bridge.patches import Function, bound
from ...keras.bridge.patches import replaces_for_strategy as replaces
from ...keras.bridge.private_names import BaseTrainer, all_layers, distributed_in, parts_of, saving_lib
from ...keras.bridge.private_names import TensorFlowTrainer as Trainer
from ...keras.bridge.private_names import trainer as keras_trainer
from ...keras.bridge.training import StrategyTraining, average_statistics, in_fit, running_statistics, step_values_of
from ...keras.fit.fit_callbacks import users_callbacks
from ...keras.fit.fit_checks import reads_logs
from ...keras.fit.written_once import assign_roles, entry_of, written_once
from ...keras.sync_batch_norm import SyncBatchNormalization
from ...tensorflow import files
from ...tensorflow.bridge import names
from ...tensorflow.bridge.types import Structure, TensorLike
from ...tensorflow.kerases import IdentitySet
from ...tensorflow.xla import context as xla
from ..input import rows_in_order, state_of_first_rank, takes_from_generator
from ..mpi_strategy import MPIStrategy
from ..variables import RankMirroredVariable
from . import step_state
from .losses import unscaled
from .optimizer import adopt
from .step_state import state, strategy_here, strategy_of

T = TypeVar("T")


# -- steps ------------------------------------------------------------------------------------------------------------


@replaces(Trainer, "_make_function",
          "the number of rows would not be known, and no warning would name a model that is not synchronised",
          "self.distribute_strategy.run(step_function")
def make_function(original: Function, self: keras.Model, step_function: Function) -> Function:
    strategy = strategy_of(self)
    if strategy is None:
        if step_function == self.train_step and runtime.is_initialized() and runtime.current().topology.size > 1 \
                and not distributed_in(self.optimizer):
            step_state.warn("the model was built outside of strategy.scope(), so each rank trains a separate model. "
                            "Build and compile it under `with strategy.scope():`.")
        return original(self, step_function)
    if self.jit_compile and (reason := xla.why_not()):
        step_state.warn(f"jit_compile=True is switched off: XLA cannot compile collectives ({reason}).")
        self.jit_compile = False
    # Keras' own steps do not use the logs, so the ranks may return different logs.
    logs_may_differ = all(getattr(type(self), name) is getattr(keras.Model, name) for name in (
        "train_step", "test_step", "compute_metrics", "get_metrics_result"))
    trains = step_function == self.train_step

    def step(data: object) -> object:
        has_rows = never_called_without_rows(self, data) if not trains else contextlib.nullcontext()
        with step_state.step_of(self, data, logs_may_differ), has_rows:
            logs = _keep_statistics_without_rows(self, lambda: step_function(data))
            if logs_may_differ:
                return tf.nest.map_structure(_as_tensor, logs)
            return {name: _weighted(log, f"the log {name!r}") for name, log in logs.items()} \
                if isinstance(logs, dict) else _weighted(logs, "the result of a step")

    function, size = original(self, step), strategy.num_replicas_in_sync

    def call(iterator: Iterator) -> object:
        nonlocal function, size
        if size != strategy.num_replicas_in_sync:
            # Ranks were lost. The scale of the loss is a constant of the trace.
            function, size = original(self, step), strategy.num_replicas_in_sync
        # train_on_batch and test_on_batch pass a generator, and return the logs to their caller.
        is_loop = isinstance(iterator, tf.distribute.DistributedIterator)
        flags, values = step_state.flags_of(self), step_values_of(self)
        flags.assign("logs_wanted", not is_loop or values.reads_logs)
        flags.assign("usual_rows", values.train_rows if trains else values.test_rows)
        return function(iterator)

    return call


def _as_tensor(log: object) -> object:
    """Return a log as a tensor. If the log is a variable of a metric, the tensor has the value of this replica."""
    return tf.convert_to_tensor(log) if isinstance(log, keras.Variable | tf.Variable | float | int) else log


def _weighted(logs: Structure, title: str) -> Structure:
    """Return logs as tensors. A scalar is weighted, so that its mean over the ranks is the mean over all rows."""
    def weighted(log: object) -> object:
        log = _as_tensor(unscaled(log, title))
        if state.weight is None or not isinstance(log, tf.Tensor) or log.shape.rank != 0 or not log.dtype.is_floating:
            return log
        return tf.math.multiply_no_nan(log, tf.cast(step_state.share(), log.dtype))

    return tf.nest.map_structure(weighted, logs)


@replaces(keras_trainer, "reduce_per_replica",
          "every log would be a collective of its own in every step (keras#20585)",
          'strategy.reduce("MEAN", v, axis=0)')
def reduce_per_replica(original: Function, values: Structure, strategy: tf.distribute.Strategy,
                       reduction: str) -> Structure:
    """Return the means of a step's logs over the ranks, in one collective; this rank's logs if nobody reads them."""
    if not isinstance(strategy, MPIStrategy) or strategy.num_replicas_in_sync == 1 or reduction not in ("auto", "mean"):
        return original(values, strategy, reduction)
    logs = tf.nest.flatten(values)
    if not logs:
        return values
    flags, state.may_differ = state.may_differ, None
    if flags is None or not all(log.dtype.is_floating for log in logs):
        return strategy.reduce("MEAN", values, axis=0)
    return tf.cond(flags.read("logs_wanted"), lambda: strategy.reduce("MEAN", values, axis=0),
                   lambda: tf.nest.map_structure(tf.identity, values))


@replaces(BaseTrainer, "_get_metrics_result_or_logs",
          "a metric among other logs of a step of the user's would be the mean of those of the ranks", "return logs")
def metrics_or_logs(original: Function, self: keras.Model, logs: object) -> object:
    found = original(self, logs)
    if strategy_of(self) is None or found is not logs or not isinstance(logs, dict):
        return found
    metrics = self.get_metrics_result()
    tracker = self._loss_tracker
    if tracker is not None and not float(tracker.count):  # The user's step does not update Keras' own "loss".
        metrics.pop(tracker.name, None)

    def of_all_ranks(name: str, log: object) -> object:
        # If the step returns all `self.metrics` by name, the metrics of compile() are one log, a dict by name.
        return {each: of_all_ranks(each, value) for each, value in log.items()} if isinstance(log, dict) \
            else metrics.get(name, log)

    return {name: of_all_ranks(name, log) for name, log in logs.items()}


# -- input ------------------------------------------------------------------------------------------------------------


@replaces(Trainer, "_maybe_symbolic_build",
          "the first batch would be reduced over the ranks, with strings and different numbers of rows",
          "self.distribute_strategy.reduce(")
def maybe_symbolic_build(original: Function, self: keras.Model, iterator: keras_trainer.TFEpochIterator | None = None,
                         data_batch: object = None) -> None:
    strategy = strategy_of(self)
    if strategy is None:
        return original(self, iterator, data_batch)
    for optimizer in parts_of(self.optimizer):
        adopt(optimizer, strategy)
    rows = None
    if iterator is not None and _may_read_once(iterator):
        # A batch that is taken from a generator cannot be put back.
        data_batch = tf.nest.map_structure(_symbolic, _specs(iterator))
    else:
        if iterator is not None:
            for *_, batches in iterator:  # (step, batches) before Keras 3.9, now (first step, last step, batches)
                data_batch = tf.nest.map_structure(strategy.extended.local, next(batches))
                break
        leaves = [leaf for leaf in keras.tree.flatten(data_batch) if leaf is not None]
        rows = rows_of([leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf) for leaf in leaves
                        if not isinstance(leaf, tf.experimental.Optional)])
    _set_usual_rows(self, int(rows) if rows is not None else 1, is_of_fit=iterator is not None)
    if rows is not None and not int(rows):
        data_batch = tf.nest.map_structure(_any_rows, data_batch)
    # A train_step of its own builds a model without a call(), and a model whose call() takes other inputs, as a GAN's.
    if getattr(type(self), "call", None) is not keras.Model.call:
        try:
            original(self, None, data_batch)
        except (ValueError, RuntimeError) as error:
            causes = error, error.__context__, getattr(error.__context__, "__context__", None)
            if type(self).train_step is Trainer.train_step or any(isinstance(each, MpistratError) for each in causes):
                raise
    with strategy.scope():  # The metrics may have been made outside of it.
        for variable in (variable for metric in self.metrics for variable in metric.variables):
            if not strategy.extended.variable_created_in_scope(variable.value):
                variable._initialize(tf.convert_to_tensor(variable))  # a new tf.Variable, of this scope


def _set_usual_rows(model: keras.Model, rows: int, is_of_fit: bool) -> None:
    """Set the number of rows of a full batch: the maximum of `rows` over the ranks. Collective.

    `rows`: The number in this rank's first batch. When fit begins it is only stored, for a later exchange.
    """
    training, values = in_fit.get(model), step_values_of(model)
    if is_of_fit and isinstance(training, StrategyTraining) and not training.has_begun:
        training.usual_rows = rows
        return
    usual = max(1, int(array_ops.allreduce(rows, op=Max, name=names.eager("strategy/usual_rows"))))
    values.test_rows = usual
    if not is_of_fit:  # Of train_on_batch or test_on_batch.
        values.train_rows = usual


def _any_rows(leaf: object) -> object:
    """Return a symbolic tensor for a dense tensor with 0 rows, because some layers cannot be built with 0 rows."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    return keras.KerasTensor([size or None for size in leaf.shape], leaf.dtype.name)


def _specs(iterator: keras_trainer.TFEpochIterator) -> Any:
    def of_replica(spec: tf.TypeSpec) -> tf.TypeSpec:
        # `spec` is of a distributed value, or with one replica of a tensor.
        is_local = isinstance(spec, tf.TensorSpec | tf.SparseTensorSpec | tf.RaggedTensorSpec | tf.OptionalSpec)
        return spec if is_local else spec._value_specs[0]

    return tf.nest.map_structure(of_replica, iterator._distributed_dataset.element_spec)


def _may_read_once(iterator: keras_trainer.TFEpochIterator) -> bool:
    """Return whether each batch may be read only once, because a generator yields it. False if shapes are unknown."""
    if not isinstance(iterator.data_adapter, TFDatasetAdapter):
        return isinstance(iterator.data_adapter, GeneratorDataAdapter)
    return takes_from_generator(iterator._distributed_dataset) and all(
        isinstance(spec, tf.OptionalSpec) or (spec.shape.rank and None not in spec.shape[1:])
        for spec in tf.nest.flatten(_specs(iterator)))


def _symbolic(spec: tf.TypeSpec) -> keras.KerasTensor | None:
    return None if isinstance(spec, tf.OptionalSpec) else \
        keras.KerasTensor(spec.shape, spec.dtype.name, sparse=isinstance(spec, tf.SparseTensorSpec))


@replaces(keras_trainer.TFEpochIterator, "__init__", "each rank would shuffle in its own order",
          "experimental_distribute_dataset(")
def epoch_iterator(original: Function, self: keras_trainer.TFEpochIterator,
                   distribute_strategy: tf.distribute.Strategy | None = None, *args: object, **kwargs: object) -> None:
    is_shared = isinstance(distribute_strategy, MPIStrategy) and distribute_strategy.num_replicas_in_sync > 1
    with state_of_first_rank() if is_shared else contextlib.nullcontext():
        original(self, distribute_strategy, *args, **kwargs)
    _set_steps(self)


@replaces(keras_trainer.TFEpochIterator, "reset", "fit would stop after the number of batches before they are split",
          "self._num_batches = self.data_adapter.num_batches")
def reset_epoch(original: Function, self: keras_trainer.TFEpochIterator) -> None:
    original(self)
    _set_steps(self)


def _set_steps(iterator: keras_trainer.TFEpochIterator) -> None:
    dataset = iterator._distributed_dataset
    if hasattr(dataset, "mpistrat_steps"):
        iterator._num_batches = dataset.mpistrat_steps


@replaces(keras.random.SeedGenerator, "next", "all ranks would drop the same units", "self.state.assign(")
def next_seed(original: Function, self: keras.random.SeedGenerator, ordered: bool = True) -> tf.Tensor:
    seed = original(self, ordered)
    strategy = strategy_here()
    if strategy is None or not strategy.extended.random_per_rank:
        return seed
    return seed + tf.cast(tf.constant([runtime.current().topology.rank * 1_000_003, 0]), seed.dtype)


# -- running statistics -----------------------------------------------------------------------------------------------


@replaces(Trainer, "predict", "the ranks would predict by models with different running statistics, and rows of files "
          "in another order", "self.make_predict_function()")
def predict(original: Function, self: keras.Model, *args: object, **kwargs: object) -> object:
    strategy = strategy_of(self)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        _average(self)
    with rows_in_order():
        return original(self, *args, **kwargs)


def _average(model: keras.Model) -> StrategyTraining:
    """Average the running statistics of a model over the ranks, and return its StrategyTraining. Collective."""
    training = StrategyTraining(model)
    average_statistics(training)
    return training


@replaces(keras.Variable, "assign_add", "Keras assigns old value + increment, and the ranks would sum both",
          "self.assign(self + value)")
def assign_add(original: Function, self: keras.Variable, value: TensorLike) -> object:
    if self.aggregation != "sum" or strategy_here() is None or not isinstance(self.value, RankMirroredVariable):
        return original(self, value)
    self.value.assign_add(tf.cast(value, self.value.dtype))
    return self.value


def _keep_statistics_without_rows(model: keras.Model, step: Callable[[], T]) -> T:
    """Run a step. If this rank has no rows, restore its running statistics, except those of synchronised layers."""
    of_all_ranks = IdentitySet(variable for layer in all_layers(model) if getattr(layer, "synchronized", False)
                               or isinstance(layer, SyncBatchNormalization) for variable in layer.variables)
    variables = [v for v in running_statistics(model) if v not in of_all_ranks] if state.rows is not None else []
    if not variables:
        return step()
    before = [tf.identity(v.value) for v in variables]
    outputs = step()

    def restore() -> tf.Tensor:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        return tf.constant(0)

    tf.cond(state.rows == 0, restore, lambda: tf.constant(0))
    return outputs


# -- evaluate and predict on a rank without rows -----------------------------------------------------------------------
# The model gets one row of zeros, which is removed from the outputs.
#
# A global batch with fewer rows than ranks leaves some ranks without rows, and so does the end of a rank's data. These
# ranks take part in the collectives of the step. But TensorFlow fails for some models without rows, in one process too
# (the constants that grappler folds have one row: "Incompatible shapes: [1,1,1,32] vs. [0,64,64,3]" in EfficientNet),
# and the other ranks would wait. Training gets no row of zeros, since the row would count: layers may take the mean
# over the rows of all ranks.


@contextlib.contextmanager
def never_called_without_rows(model: keras.Model, data: object) -> Iterator[None]:
    strategy, before = strategy_of(model), state.called
    # XLA compiles a function for each number of rows, and does not fold in this way.
    is_needed = strategy is not None and strategy.num_replicas_in_sync > 1 and not xla.is_compiled()
    state.called = (model, is_empty) if is_needed and (is_empty := _is_empty(data)) is not None else None
    try:
        yield
    finally:
        state.called = before


def _is_empty(data: object) -> tf.Tensor | None:
    """Return whether a batch has no rows, as a tensor; None if its shapes show that it has rows."""
    known = {leaf.shape[0] for leaf in tf.nest.flatten(data) if isinstance(leaf, tf.Tensor) and leaf.shape.rank}
    if 0 in known:
        return tf.constant(True)
    rows = rows_of(data) if not known or None in known else None
    return None if rows is None else rows == 0


@replaces(Trainer, "predict_step", "a model of which TensorFlow fails without rows would fail",
          "y_pred = self(x, training=False)")
def predict_step(original: Function, self: keras.Model, data: object) -> object:
    with never_called_without_rows(self, data):
        return original(self, data)


@replaces(keras.Model, "__call__", "likewise", "super().__call__(*args, **kwargs)")
def call(original: Function, self: keras.Model, *args: object, **kwargs: object) -> Any:
    if state.called is None or state.called[0] is not self:
        return original(self, *args, **kwargs)
    is_empty = state.called[1]
    args, kwargs = keras.tree.map_structure(lambda value: _with_rows(value, is_empty), (args, kwargs))
    counted = [v for layer in (self, *all_layers(self)) for metric in layer._metrics for v in metric.variables]
    before = [tf.identity(v.value) for v in counted]
    outputs = original(self, *args, **kwargs)
    for variable, value in zip(counted, before, strict=True):
        variable.assign(tf.where(is_empty, value, variable.value))
    return keras.tree.map_structure(lambda value: _without_rows(value, is_empty), outputs)


def _with_rows(value: tf.Tensor, is_empty: tf.Tensor) -> Any:
    if not _may_be_empty(value):
        return value

    def zeros() -> tf.Tensor:
        # Sizes of a row that the spec of the input does not give are unknown here.
        return tf.zeros(tf.concat([[1], tf.maximum(tf.shape(value)[1:], 1)], 0), value.dtype)

    return _either(is_empty, zeros, value)


def _without_rows(value: tf.Tensor, is_empty: tf.Tensor) -> Any:
    is_known = tf.get_static_value(is_empty)  # Then the model had one row, by the shape too.
    if not (_may_be_empty(value) or (is_known and isinstance(value, tf.Tensor) and value.shape.rank)):
        return value
    result = _either(is_empty, lambda: value[:0], value)
    mask = getattr(value, "_keras_mask", None)
    if mask is not None:
        result._keras_mask = _without_rows(mask, is_empty)
    return result


def _may_be_empty(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank != 0 and (value.shape.rank is None or not value.shape[0])


def _either(is_empty: tf.Tensor, other: Function, value: tf.Tensor) -> tf.Tensor:
    if tf.get_static_value(is_empty):  # The shape keeps 0 rows, which Keras' losses use.
        return other()
    result = tf.cond(is_empty, other, lambda: tf.identity(value))
    if value.shape.rank is not None:
        result.set_shape([None, *value.shape[1:]])
    return result


# -- the callbacks of evaluate; mpistrat/keras/fit has those of fit ----------------------------------------------------


@replaces(Trainer, "evaluate", "the ranks would evaluate models with different running statistics",
          "self.make_test_function()")
def evaluate(original: Function, self: keras.Model, *args: object, **kwargs: object) -> object:
    strategy = strategy_of(self)
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return original(self, *args, **kwargs)
    training = _average(self)
    call = bound(original, self, *args, **kwargs)
    given = call.arguments.get("callbacks")
    if isinstance(given, CallbackList):  # fit validates, and has looked at its callbacks.
        return original(*call.args, **call.kwargs)
    # The ranks may have different callbacks. If no callback reads the logs of a step, they are not reduced.
    callbacks = users_callbacks(given)
    own = tuple(entry_of(callback, training) for callback in callbacks), any(map(reads_logs, callbacks))
    of_ranks = array_ops.allgather_object(own, f"{training.name}/evaluate")
    call.arguments["callbacks"] = wrapped = written_once(callbacks, training)
    assign_roles(wrapped, [entries for entries, _ in of_ranks], training)
    values = step_values_of(self)
    before, values.reads_logs = values.reads_logs, any(reads for _, reads in of_ranks)
    try:
        return original(*call.args, **call.kwargs)
    finally:
        values.reads_logs = before


# -- files of models; keras/sharded/sharded_optimizer.py has the rules for all models ----------------------------------


@replaces(saving_lib, "get_attr_skipset", "the variables of the optimizer that it makes would be broadcast",
          "ref_obj = Layer()")
def attributes_to_skip(original: Function, obj_type: str) -> set[str]:
    """Call `original` without collectives, because only the rank that writes the file calls this function."""
    with files.alone():
        return original(obj_type)


@replaces(keras.Variable, "_copy_trackable_to_cpu",
          "the second asynchronous checkpoint would fail, as it does without strategies: Keras makes a new variable",
          "tf.Variable(object_map[self.value])")
def copy_to_cpu(original: Function, self: keras.Variable, object_map: dict) -> None:
    """Copy a variable to the CPU for an asynchronous checkpoint. Later checkpoints update the same copy."""
    if self not in object_map or not isinstance(self.value.distribute_strategy, MPIStrategy):
        return original(self, object_map)
    self.value._copy_trackable_to_cpu(object_map)
    object_map[self].assign(object_map[self.value])
    return None
