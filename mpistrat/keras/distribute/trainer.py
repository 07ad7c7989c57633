"""What takes the place of functions of Keras under MPIStrategy. Each takes the original and returns the replacement.

A replacement does what the original does unless an MPIStrategy is at work. Which are applied, and why, is in
_strategy_patches.py.
"""

import contextlib
import warnings
from typing import Any

import keras
import tensorflow as tf

from ...api import ops as array_ops
from ...api import runtime
from ...core.request import Max
from ...tensorflow.distribute import MPIStrategy, collectives
from ...tensorflow.distribute.files import errors_shared
from ...tensorflow.distribute.seeds import state_of_first_rank
from ...tensorflow.distribute.threads import wire_name
from ..optimizer import is_distributed
from . import files, steps
from ._private import GeneratorDataAdapter

# Callbacks of Keras that define what to do after a batch, and look at no logs then, or only show them.
_READ_NO_LOGS = (keras.callbacks.ProgbarLogger, keras.callbacks.History, keras.callbacks.BackupAndRestore)


def _strategy_of(model: Any) -> MPIStrategy | None:
    strategy = getattr(model, "_distribute_strategy", None)
    return strategy if isinstance(strategy, MPIStrategy) else None


def all_reduce_sum_gradients(original: Any) -> Any:
    def replacement(self: Any, grads_and_vars: Any) -> Any:
        strategy = steps.strategy_here()
        if strategy is None:
            return original(self, grads_and_vars)
        pairs = list(grads_and_vars)
        strategy.extended.assigned_in_lockstep(self._iterations.value)
        present = [i for i, (gradient, _) in enumerate(pairs) if gradient is not None]
        gradients = [pairs[i][0] for i in present]
        reduced = getattr(self, "_mpistrat_clipped", None)
        if reduced is None or len(reduced) != len(gradients) \
                or any(a is not b for a, b in zip(reduced, gradients, strict=True)):
            reduced = steps.reduce_gradients(self, gradients, [pairs[i][1] for i in present])
        object.__setattr__(self, "_mpistrat_clipped", None)
        for i, gradient in zip(present, reduced, strict=True):
            pairs[i] = (gradient, pairs[i][1])
        return pairs
    return replacement


def clip_gradients(original: Any) -> Any:
    def replacement(self: Any, grads: Any) -> Any:
        clips = any(getattr(self, name) for name in ("clipnorm", "global_clipnorm", "clipvalue"))
        if not clips or steps.strategy_here() is None:
            return original(self, grads)
        clipped = list(original(self, steps.reduce_gradients(self, list(grads), None)))
        # Not by plain assignment, by which Keras would track them.
        object.__setattr__(self, "_mpistrat_clipped", clipped)
        return clipped
    return replacement


def check_finite(original: Any) -> Any:
    def replacement(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if steps.strategy_here() is None:
            return finite
        not_finite = tf.cast(tf.logical_not(finite), tf.int32)
        return collectives.all_reduce([not_finite], tf.distribute.ReduceOp.SUM, "finite")[0] == 0
    return replacement


def reduce_per_replica(original: Any) -> Any:
    def replacement(values: Any, strategy: Any, reduction: str) -> Any:
        if isinstance(strategy, MPIStrategy) and strategy.num_replicas_in_sync > 1 and reduction in ("auto", "mean"):
            return steps.reduce_logs(strategy, values) if tf.nest.flatten(values) else values
        return original(values, strategy, reduction)
    return replacement


def make_function(original: Any) -> Any:
    def replacement(self: Any, step_function: Any) -> Any:
        if _strategy_of(self) is None:
            if step_function == self.train_step:
                _warn_of_model_outside(self)
            return original(self, step_function)
        if self.jit_compile:
            warnings.warn("jit_compile=True is switched off: collectives cannot be compiled by XLA.", stacklevel=2)
            self.jit_compile = False
        may_stay = _has_keras_own_steps(self)

        def step(data: Any) -> Any:
            with steps.step_of(self, data, may_stay):
                return steps.keep_statistics_of_empty(self, lambda: step_function(data))

        function = original(self, step)

        def call(iterator: Any) -> Any:
            # train_on_batch and test_on_batch give a generator, and return the logs to their caller.
            wanted = not isinstance(iterator, tf.distribute.DistributedIterator) or self._mpistrat_logs_wanted
            steps.tell("logs_wanted", wanted)
            return function(iterator)

        return call
    return replacement


def _has_keras_own_steps(model: Any) -> bool:
    """Whether the logs of a step are the model's metrics, which are aggregated at the end of an epoch in any case."""
    names = ("train_step", "test_step", "compute_metrics", "get_metrics_result")
    return all(getattr(type(model), name) is getattr(keras.Model, name) for name in names)


def _warn_of_model_outside(model: Any) -> None:
    if runtime.is_initialized() and runtime.current().topology.size > 1 and not is_distributed(model.optimizer):
        warnings.warn("the model was built outside of strategy.scope(), so that each rank trains a model of its own. "
                      "Build and compile it under `with strategy.scope():`.", stacklevel=2)


def maybe_symbolic_build(original: Any) -> Any:
    def replacement(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        strategy = _strategy_of(self)
        if strategy is None or strategy.num_replicas_in_sync == 1:
            return original(self, iterator, data_batch)
        rows = None
        if iterator is not None and isinstance(iterator.data_adapter, GeneratorDataAdapter):
            # What is taken from a generator cannot be given back.
            data_batch = tf.nest.map_structure(_symbolic, iterator._distributed_dataset.element_spec)
        else:
            if iterator is not None:
                for *_, batches in iterator:  # before Keras 3.9 the step comes with it, now the first and the last
                    data_batch = tf.nest.map_structure(strategy.extended.local, next(batches))
                    break
            rows = steps.rows_of([leaf if tf.is_tensor(leaf) else tf.convert_to_tensor(leaf)
                                  for leaf in _without_none(data_batch)])
        usual = array_ops.allreduce(int(rows) if rows is not None else 1, op=Max, name=wire_name("usual_rows"))
        steps.tell("usual_rows", max(1, int(usual)))
        return original(self, None, data_batch)
    return replacement


def _symbolic(spec: Any) -> Any:
    spec = spec._value_specs[0]
    return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=isinstance(spec, tf.SparseTensorSpec))


def _without_none(data: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(data) if leaf is not None
            and not isinstance(leaf, tf.experimental.Optional)]


def on_begin(original: Any) -> Any:
    def replacement(self: Any, logs: Any = None) -> Any:
        model = getattr(self, "_model", None)
        strategy = _strategy_of(model)
        if strategy is not None:
            wanted = any(_reads_logs(callback) for callback in self.callbacks)
            if strategy.num_replicas_in_sync > 1:
                # A rank may have callbacks that others have not.
                everybody = array_ops.allreduce([int(wanted), int(any(map(files.writes, self.callbacks)))], op=Max,
                                                name=wire_name("callbacks"))
                wanted = bool(everybody[0])
                if everybody[1] and not hasattr(self, "_mpistrat_shared_out"):
                    files.share_out(self)
                    self._mpistrat_shared_out = True
            object.__setattr__(model, "_mpistrat_logs_wanted", wanted)
        with _errors_shared(self):
            files.write_deferred(self)
            return original(self, logs)
    return replacement


def _errors_shared(callbacks: Any) -> Any:
    """Where callbacks write files, an error on one rank is one on all."""
    return errors_shared() if hasattr(callbacks, "_mpistrat_shared_out") else contextlib.nullcontext()


def _reads_logs(callback: Any) -> bool:
    """Whether a callback may look at the logs of a batch."""
    if isinstance(callback, _READ_NO_LOGS) or getattr(callback, "save_freq", None) == "epoch":
        return False
    if isinstance(callback, keras.callbacks.TensorBoard):
        return callback.update_freq != "epoch"
    return not all(getattr(getattr(callback, name), "_is_default", False)
                   for name in ("on_batch_end", "on_train_batch_end", "on_test_batch_end"))


def epoch_iterator(original: Any) -> Any:
    def replacement(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        shared_out = isinstance(distribute_strategy, MPIStrategy) and distribute_strategy.num_replicas_in_sync > 1
        with state_of_first_rank() if shared_out else contextlib.nullcontext():
            original(self, distribute_strategy, *args, **kwargs)
    return replacement


def on_epoch_end(original: Any) -> Any:
    def replacement(self: Any, epoch: int, logs: Any = None) -> Any:
        if getattr(self, "_model", None) is not None:
            steps.average_statistics(self._model)
        with _errors_shared(self):
            return original(self, epoch, logs)
    return replacement


def on_train_end(original: Any) -> Any:
    def replacement(self: Any, logs: Any = None) -> Any:
        with _errors_shared(self):
            return original(self, logs)
    return replacement


def with_averaged_statistics(original: Any) -> Any:
    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        steps.average_statistics(self)
        return original(self, *args, **kwargs)
    return replacement


def next_seed(original: Any) -> Any:
    def replacement(self: Any, ordered: bool = True) -> Any:
        seed = original(self, ordered)
        strategy = steps.strategy_here()
        if strategy is None or not strategy.extended.random_per_rank:
            return seed
        rank = runtime.current().topology.rank
        return seed + tf.cast(tf.constant([rank * 1_000_003, 0]), seed.dtype)
    return replacement
