"""DistributedOptimizer: copies a Keras optimizer. The copy averages its gradients over the ranks.

For users. Copying is local, and applying gradients is collective.
"""

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import keras
import tensorflow as tf
from keras.optimizers import LossScaleOptimizer, Optimizer

from ...api.process_sets import ProcessSet, global_process_set, resolved
from ...core.errors import InvalidRequestError, MissingDependencyError
from ...core.request import Average, ReduceOp, Sum
from ...tensorflow import gradients, ops
from ...tensorflow.bridge import names
from ...tensorflow.bridge.arguments import checked
from ...tensorflow.bridge.types import OptionalGradient, Reducible, Tensor, Variable
from ...tensorflow.compression import Compression, Compressor
from ...tensorflow.gradients import indices_of
from ...tensorflow.kerases import (
    accumulated_passes,
    is_accumulator,
    is_built,
    is_keras2,
    is_keras2_in_use,
    is_optimizer,
    steps_of,
)
from ...tensorflow.list_ops import as_tensor, with_unique_rows
from ...tensorflow.xla.context import is_compiled
from .. import clone
from ..bridge import patches
from ..bridge.patches import Function, replaces
from ..bridge.private_names import distributed_in, parts_of, passes_on, serialise_as, trained_by
from ..fit import fit_callbacks  # noqa: F401
from ..sharded.shard_state import Arguments, OptimizerState
from ..sharded.sharded_optimizer import Sharded, require_shardable, whole_state

logger = logging.getLogger(__name__)
_classes: dict[tuple[type, tuple[type, ...]], type] = {}


class _Distributed:
    """A base of all distributed optimizers. It adds configurations, copies and register_local_var."""

    is_distributed = True

    @functools.cached_property
    def _mpistrat(self) -> OptimizerState:
        # _distribute sets this attribute in vars(): after a plain assignment Keras would track its contents.
        return OptimizerState(type(self).__name__)

    def get_config(self) -> dict[str, Any]:
        """Return the Keras configuration. In this process, from_config makes a distributed optimizer from it."""
        return clone.marked(super().get_config(), self._mpistrat_again(is_in_process=True))  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], **arguments: object) -> Optimizer:
        """Return a distributed optimizer from `config`, which get_config of a distributed optimizer has returned.

        Raises InvalidRequestError if `config` comes from a file or from an optimizer that is not distributed.
        """
        if clone.again_of(config) is None:
            raise InvalidRequestError(
                "this configuration does not say how gradients are averaged, since it comes from a file or from an "
                "optimizer that is not distributed. Write "
                f"hvd.DistributedOptimizer(keras.optimizers.{cls.__name__}.from_config(config)).")
        return clone.original_class(cls).from_config(config, **arguments)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Make pickle and copy return a distributed copy."""
        how: Any = super().__reduce_ex__(protocol)
        return clone.distributed_when_loaded(self, how)

    def _mpistrat_again(self, is_in_process: bool, is_whole: bool = True) -> clone.Again:
        """Return a function that distributes a copy of this optimizer, with the same arguments if they can be copied.

        If not, training with the copy is an error. `is_in_process`: Whether the copy stays in this process, where
        the process set is known. `is_whole`: Whether all inner optimizers of the copy are distributed.
        """
        its = self._mpistrat.arguments
        is_known = is_whole and its is not None and (is_in_process or its.process_set is None) \
            and not self._mpistrat.reducer.has_local and not its.options.groups.has_lists
        return functools.partial(_distribute_copy, its if is_known else None)

    def register_local_var(self, variable: Variable) -> None:
        """Exclude this variable's gradients from the averaging."""
        self._mpistrat.reducer.register_local(variable)


@checked
def DistributedOptimizer(optimizer: Optimizer, name: str | None = None,  # noqa: N802
                         device_dense: str = "", device_sparse: str = "",
                         compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: ReduceOp = Average,
                         backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                         num_groups: int = 0, groups: gradients.Groups = None,
                         process_set: ProcessSet = global_process_set,
                         scale_local_gradients: bool = True, average_statistics: bool = True,
                         uneven: str = "error", use_locking: bool = False, check_weights: bool = True,
                         shard_state: bool = False) -> Optimizer:
    """Return a copy of `optimizer` that averages its gradients over the ranks before it applies them.

    The class of the copy is a subclass with the same name. The copy compiles, saves and loads like the original, and a
    saved model loads where mpistrat is not installed. Gradients are clipped after they are averaged. A variable that
    Keras overwrites with its gradient (overwrite_with_gradient, for float8) gets the largest value of all ranks. All
    ranks must create their optimizers in the same order, apart from optimizers that are deleted before any optimizer
    averages gradients. Where XLA cannot compile collectives, Model.compile treats jit_compile="auto" (its default) as
    False. Local; `apply` is collective.

    Args:
        optimizer: Any Keras optimizer, also a LossScaleOptimizer, built or not. It is not changed. A Keras 2
            (tf_keras) optimizer that is already built shares its variables with the new optimizer.
        name: The name of the new optimizer; default: the name of `optimizer`.
        device_dense, device_sparse: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression.
        sparse_as_dense: Convert tf.IndexedSlices to dense tensors before the reduction.
        gradient_predivide_factor: Splits the division by the number of ranks N. Gradients are divided by this factor
            before the sum, and by N / factor after the sum. Average only.
        op: Average or Sum.
        backward_passes_per_step: The number k of gradients that are summed before their sum is averaged and applied.
        average_aggregated_gradients: Divide the sum of the k gradients by k.
        num_groups: Deprecated form of `groups`.
        groups: Which gradients are reduced together; default: all. A number: that many groups, with about equal numbers
            of gradients. Lists of variables: a group for the gradients of each list, and a last group for the gradients
            of all remaining variables.
        process_set: The ranks that take part. On other ranks the optimizer works like the original.
        scale_local_gradients: Whether gradients that are excluded by `register_local_var` are divided by N.
        average_statistics: Whether fit averages the running statistics of layers such as BatchNormalization over the
            ranks, at the end of each epoch and before a ModelCheckpoint saves within an epoch. False: each rank keeps
            its own statistics, as in Horovod.
        uneven: What fit does if the ranks have different numbers of batches. "error": fit raises an error when it
            begins, if Keras knows the numbers. "join": ranks without batches wait at the end of each epoch, and the
            other ranks average their gradients. Then all ranks get the weights and the optimizer's state of the rank
            with the most batches. Accumulated gradients of an incomplete update are dropped. All ranks must pass the
            same value.
        use_locking: Accepted for compatibility with Horovod, ignored. It is for optimizers of TensorFlow 1.
        check_weights: Whether the first reductions check that the ranks train the same weights. Pass False if each rank
            adapts the weights on purpose before it computes the gradient, as in MAML.
        shard_state: Divide the optimizer's state among the ranks, see ShardedOptimizer.

    Raises:
        ValueError: `optimizer` is not a Keras optimizer, or is already distributed; an argument is out of range; or
            `shard_state` is set, and the state of the optimizer cannot be divided.
        MissingDependencyError: From this function or from `apply`, if gradients are accumulated, and this version of
            Keras lacks methods that mpistrat needs to average accumulated gradients.
    """
    process_set = resolved(process_set)
    _check(optimizer, op, backward_passes_per_step)
    if uneven not in ("error", "join"):
        raise InvalidRequestError(f"uneven must be 'error' or 'join'. Received: {uneven!r}")
    changes: dict[str, object] = {} if name is None else {"name": name}
    if not is_keras2(optimizer):
        if backward_passes_per_step > 1:
            changes["gradient_accumulation_steps"] = backward_passes_per_step
        if backward_passes_per_step > 1 or optimizer.gradient_accumulation_steps:
            require_hooks(type(optimizer))
    factor = 1.0 if average_aggregated_gradients else float(backward_passes_per_step)
    if shard_state:
        require_shardable(optimizer, uneven)
    own_name = names.OptimizerName(process_set.process_set_id or 0)
    options = gradients.GradientOptions(compression, sparse_as_dense, gradients.GradientGroups(groups, num_groups))
    its = Arguments(own_name, factor, options, op, gradient_predivide_factor,
                    None if process_set is global_process_set else process_set, scale_local_gradients,
                    average_statistics, uneven, check_weights, shard_state, backward_passes_per_step)
    return _distribute(optimizer, its, its.name, changes, backward_passes_per_step)


def ShardedOptimizer(optimizer: Optimizer, **arguments: Any) -> Optimizer:  # noqa: N802
    """Return a DistributedOptimizer whose state and update are divided among the ranks (ZeRO-1, arXiv 1910.02054).

    A step reduce-scatters the gradients, updates this rank's parts of the weights, and all-gathers the weights. Each of
    N ranks has 1/N of the state (with Adam the whole state is twice the size of the weights) and does 1/N of the
    update. A rank also has a second copy of its parts of the weights. Optimizers that compute each element separately
    (SGD, Adam, AdamW, Nadam, Adamax, Adadelta, Adagrad, RMSprop, Ftrl, Lion) divide the elements of variables among the
    ranks. With Lamb, Muon and user-defined optimizers each variable belongs to one rank as a whole, and gradients are
    all-reduced. On one host, SGD and Adam compute the same weights as a DistributedOptimizer, bit for bit, unless XLA
    compiles the steps. With accumulation, each backward pass reduces its gradients, and each rank accumulates its part.

    `optimizer.variables` has only the variables that are the same on all ranks: the step counter and the learning rate.
    Files have the format of the original optimizer, and load with any number of ranks. fit gathers the whole state on
    rank 0 at the end of each epoch. At other times call `optimizer.consolidate_state(to=0)` on all ranks before rank 0
    saves. A rank without the whole state gets an error when it saves or copies the optimizer. Load a file on all ranks,
    or on rank 0 before a fit with BroadcastGlobalVariablesCallback. Local; `apply` is collective.

    Args:
        optimizer: Any Keras 3 optimizer without inner optimizers. It is not changed.
        arguments: Further arguments, as for DistributedOptimizer.

    Raises:
        ValueError: As for DistributedOptimizer. Also if the optimizer passes gradients on to inner optimizers
            (LossScaleOptimizer, MultiOptimizer) or has no update_step, or if uneven="join".
    """
    return DistributedOptimizer(optimizer, shard_state=True, **arguments)


@checked
def PartialDistributedOptimizer(optimizer: Optimizer, name: str | None = None,  # noqa: N802
                                device_dense: str = "", device_sparse: str = "",
                                compression: type[Compressor] = Compression.none, sparse_as_dense: bool = False,
                                gradient_predivide_factor: float = 1.0, op: ReduceOp = Average,
                                backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                                groups: gradients.Groups = None, process_set: ProcessSet = global_process_set,
                                local_layers: gradients.Layer | Sequence[gradients.Layer] | None = None,
                                scale_local_gradients: bool = True, uneven: str = "error",
                                average_statistics: bool = True, check_weights: bool = True) -> Optimizer:
    """Return a DistributedOptimizer that averages neither gradients nor running statistics of the local layers.

    To let each rank start with its own weights in these layers, exclude these weights from the broadcast:
    BroadcastGlobalVariablesCallback(0, local_variables=...).

    Args:
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense: As for DistributedOptimizer.
        gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients: As above.
        groups, process_set, scale_local_gradients, uneven, average_statistics, check_weights: As above.
        local_layers: A Keras layer, or a list of layers. All layers must be built.

    Raises:
        ValueError: As for DistributedOptimizer. Also if `local_layers` has an object that is not a built layer.
    """
    distributed = DistributedOptimizer(
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
        backward_passes_per_step, average_aggregated_gradients, groups=groups, process_set=process_set,
        scale_local_gradients=scale_local_gradients, average_statistics=average_statistics, uneven=uneven,
        check_weights=check_weights)
    gradients.register_local_layers(local_layers, distributed.register_local_var)
    return distributed


def _distribute(optimizer: Optimizer, its: Arguments, name: names.OptimizerName, changes: Mapping[str, object],
                passes: int) -> Optimizer:
    """Return a distributed optimizer with the state of `optimizer`, and the configuration updated by `changes`.

    `its` must have valid arguments. An update takes `passes` times as many backward passes as with `optimizer`.
    """
    process_set = resolved(its.process_set)
    reducer = gradients.GradientReducer(name, its.options, its.op, its.gradient_predivide_factor,
                                        its.scale_local_gradients, process_set)
    distributed = _copy_or_share(optimizer, changes, its.shard_state)
    reducer.checks_weights = its.check_weights
    reducer.changes_early = any(
        # A MultiOptimizer that gets its optimizers from a function has none yet.
        getattr(part, "weight_decay", 0) or getattr(part, "optimizers", None) == [] for part in parts_of(distributed))
    vars(distributed)["_mpistrat"] = OptimizerState(type(distributed).__name__, reducer, its)
    if is_keras2(optimizer):
        vars(distributed).update(gradient_accumulation_steps=its.passes, _accumulated_gradients=[])
    _take_over(distributed, optimizer, passes)
    clone.keep_marks(clone.original_class(type(optimizer)))
    patches.apply()
    return distributed


def _distribute_copy(its: Arguments | None, optimizer: Optimizer) -> Optimizer:
    """Distribute `optimizer`, which Keras has copied from a distributed optimizer whose arguments were `its`.

    If `its` is None, training with the result is an error. All ranks make the copies that they train in the same order.
    """
    if its is not None:
        process_set = resolved(its.process_set)
        copy = _distribute(optimizer, its, names.OptimizerName(process_set.process_set_id or 0, its.name), {}, 1)
    else:
        copy = _copy_or_share(optimizer, {})
        _take_over(copy, optimizer, 1)
    copy._mpistrat.is_copy = True
    return copy


def _copy_or_share(optimizer: Optimizer, changes: Mapping[str, object], is_sharded: bool = False) -> Optimizer:
    """Return an optimizer of a distributed class, with the configuration of `optimizer` updated by `changes`.

    A built Keras 2 optimizer has no list of the weights that it was built for. The result shares its variables.
    """
    original = clone.original_class(type(optimizer))
    applying: type = Applying
    if is_keras2(original):
        from ..keras2.applying import applying_of  # It imports tf_keras.
        applying = applying_of(original)
    cls = class_with((*((Sharded,) if is_sharded else ()), _Distributed, applying), original)
    make = clone.sharing if is_keras2(optimizer) and is_built(optimizer) else clone.copy_of
    return make(optimizer, cls, changes)


def _take_over(new: Optimizer, old: Optimizer, passes: int) -> None:
    """Copy the state of `old` to `new`: the number of steps, and if `old` is built, its other variables."""
    if is_keras2(old):
        if steps_of(new) is not steps_of(old):
            steps_of(new).assign(steps_of(old))
        return
    if old.built:
        new.build(trained_by(old))
    with whole_state(new, is_read=False):
        variables = [v for v in new.variables if passes == 1 or not is_accumulator(v.name)]
        for variable, value in zip(variables, old.variables, strict=True):
            variable.assign(value)
    if passes > 1:
        new._iterations.assign(old._iterations * passes)  # With accumulation Keras counts the passes.


def _check(optimizer: Optimizer, op: ReduceOp, passes: int) -> None:
    if not is_optimizer(optimizer):
        is_of_tf1 = issubclass(optimizer if isinstance(optimizer, type) else type(optimizer),
                               tf.compat.v1.train.Optimizer)
        advice = (", which is an optimizer of TensorFlow 1: take one of keras.optimizers for a Keras model, or average "
                  "the gradients with mpistrat.tensorflow.DistributedGradientTape.") if is_of_tf1 else ""
        raise InvalidRequestError("DistributedOptimizer takes a Keras optimizer, for example "
                                  f"keras.optimizers.Adam(1e-3). Received: {optimizer!r}{advice}")
    # A script that distributes a copy that Keras has made does not know that the copy is distributed already.
    if distributed_in(optimizer) and not (isinstance(optimizer, _Distributed) and optimizer._mpistrat.is_copy):
        raise InvalidRequestError("the optimizer is distributed already; its gradients would be averaged twice. "
                                  "Leave out this DistributedOptimizer.")
    if op not in (Average, Sum):
        raise InvalidRequestError(f"op currently only supports Average and Sum. Received: {getattr(op, 'name', op)}")
    if passes > 1 and passes_on(optimizer):
        advice = ". Keras 2 accumulates no gradients in it. Leave that argument out." if is_keras2(optimizer) \
            else ". Give gradient_accumulation_steps to the inner optimizer."
        raise InvalidRequestError(f"backward_passes_per_step does not work with {type(optimizer).__name__}{advice}")
    if passes > 1 and accumulated_passes(optimizer):
        raise InvalidRequestError("backward_passes_per_step of DistributedOptimizer and gradient_accumulation_steps of "
                                  "the Keras optimizer cannot be combined. Leave out one of them.")


def class_with(mix_ins: tuple[type, ...], original: type[Optimizer]) -> type[Optimizer]:
    """Return the class with the bases `mix_ins` and `original`, in this order. Equal arguments give the same class."""
    if (original, mix_ins) not in _classes:
        body = {"__module__": original.__module__, "__doc__": original.__doc__, "__qualname__": original.__qualname__}
        _classes[original, mix_ins] = type(original.__name__, (*mix_ins, original), body)
        serialise_as(_classes[original, mix_ins], original)
    return _classes[original, mix_ins]


# -- the averaging of gradients in an optimizer of Keras 3. Keras calls these methods. Collective ----------------------
#
# For Keras 2 see mpistrat/keras/keras2/applying.py.

# Private methods that Keras calls while it applies gradients. These methods reduce accumulated gradients.
_HOOKS = ("_backend_apply_gradients", "_clip_gradients")
_CLIPS_BEFORE = "this Keras clips gradients before it accumulates them"


class Applying:
    """A mix-in for classes of Keras 3 optimizers that reduces gradients over the ranks before Keras clips them.

    With gradient accumulation, the sum of the gradients is reduced once per update, not the gradient of each step.
    """

    _mpistrat: OptimizerState

    def apply(self, grads: Iterable[OptionalGradient],
              trainable_variables: Iterable[keras.Variable] | None = None) -> tf.Tensor | None:
        """Average the gradients over the ranks, and call the original class' apply with the averages. Collective.

        Raises:
            MissingDependencyError: Gradients are accumulated, and Keras does not call the methods that average them.
            ValueError: The number of variables differs from the number of gradients.
        """
        grads = list(grads)
        given = None if trainable_variables is None else list(trainable_variables)  # It may be an iterator.
        variables = trained_by(self) if given is None else given
        if len(grads) != len(variables):
            if given is None:
                return super().apply(grads)  # type: ignore[misc]  # Keras raises the error.
            raise InvalidRequestError(f"apply() got {len(grads)} gradients for {len(given)} variables.")
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
    """Raise MissingDependencyError if accumulated gradients cannot be averaged in `cls` with this version of Keras."""
    # The mix-ins of a distributed class define the hooks in any case.
    missing = [name for name in _HOOKS if not hasattr(clone.original_class(cls), name)]
    if missing:
        raise _unknown(f"{cls.__name__} has no {', '.join(missing)}")
    if keras.__version__.startswith(("3.0.", "3.1.", "3.2.", "3.3.", "3.4.")):
        raise _unknown(_CLIPS_BEFORE)


def _unknown(what: str) -> MissingDependencyError:
    return MissingDependencyError(
        f"DistributedOptimizer cannot average accumulated gradients with Keras {keras.__version__}: {what}. Leave out "
        "backward_passes_per_step and gradient_accumulation_steps, or install Keras 3.5 or 3.15, which are tested.")


# Under mixed_float16 compile() wraps every optimizer in a LossScaleOptimizer.
@replaces(LossScaleOptimizer, "check_finite",
          "a rank with an overflow would skip the step, and the others would wait for its gradients", "isfinite(g)")
def check_finite(original: Function, self: LossScaleOptimizer, grads: list[tf.Tensor]) -> tf.Tensor:
    """Return whether the gradients of all ranks are finite. Keras' own check sees only the gradients of this rank."""
    finite = original(self, grads)
    states = [part._mpistrat for part in parts_of(self.inner_optimizer) if hasattr(part, "_mpistrat")]
    return states[0].reducer.all_true(finite, "finite") if states else finite


# -- the rows of tf.IndexedSlices are added in one order, so that repeated rows have one sum on all ranks --------------
#
# Keras adds slices to a variable with TensorFlow's ResourceScatterAdd and ResourceScatterSub. On the CPU these use
# several threads from 1024 rows on, and add rows with the same index in the order of the threads, so ranks with the
# same slices get different bits. ResourceScatterNdAdd and ResourceScatterNdSub add row after row, and take no longer:
# https://github.com/tensorflow/tensorflow/tree/v2.21.0/tensorflow/core/kernels (ScatterFunctorBase, ScatterNdFunctor).
# XLA compiles both to the same code. When Keras makes slices dense, it sums with UnsortedSegmentSum, in which each
# thread has its own rows of the result.
#
# On a GPU all of these operations use atomic additions. There repeated rows are summed before they are added, by
# UnsortedSegmentSum, which is deterministic with the variable that init() sets (set_cuda_variables). In steps that XLA
# compiles for a GPU gradients are dense before they are averaged (reduce_gradients). Elsewhere repeated rows are not
# summed first, because Keras' optimizers square each row, also in one process.
#
# Applied with the first DistributedOptimizer, the first MPIStrategy, and the first slices of a DistributedGradientTape.

_REASON = "rows that repeat would have another sum on each rank"


@replaces(Optimizer, "assign_add", _REASON, "variable.scatter_add(value)")
def assign_add(original: Function, self: Optimizer, variable: keras.Variable | tf.Variable, value: object) -> None:
    _add(tf.raw_ops.ResourceScatterNdAdd, original, self, variable, value)


@replaces(Optimizer, "assign_sub", _REASON, "variable.scatter_sub(value)")
def assign_sub(original: Function, self: Optimizer, variable: keras.Variable | tf.Variable, value: object) -> None:
    _add(tf.raw_ops.ResourceScatterNdSub, original, self, variable, value)


def _add(operation: Callable, original: Function, optimizer: Optimizer, variable: keras.Variable | tf.Variable,
         value: object) -> None:
    """Scatter tf.IndexedSlices into a variable by `operation`. Pass other values to `original`, Keras' own method."""
    if not isinstance(value, tf.IndexedSlices):
        original(optimizer, variable, value)
        return
    resource = variable.value if isinstance(variable, keras.Variable) else variable
    rows = as_tensor(tf.IndexedSlices(tf.cast(value.values, resource.dtype), value.indices))
    if _adds_atomically(resource):
        rows = with_unique_rows(rows)
    operation(ref=resource.handle, indices=rows.indices[:, tf.newaxis], updates=rows.values)


def _adds_atomically(resource: tf.Variable) -> bool:
    """Return whether TensorFlow adds rows in any order (on a GPU). Repeated rows must then be summed first."""
    return "GPU" in resource.device and not is_compiled()


# -- the collectives with Horovod's signatures for Keras scripts, and load_model: for users ----------------------------
#
# Each collective passes its arguments on to the function of mpistrat.tensorflow, which has another argument order.


def allreduce(value: Reducible, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
              postscale_factor: float = 1.0, op: ReduceOp | None = None,
              compression: type[Compressor] = Compression.none) -> Tensor:
    """Return the reduction of `value` over all ranks, as mpistrat.tensorflow.allreduce does. Collective."""
    return ops.allreduce(value, average=average, op=op, name=name, prescale_factor=prescale_factor,
                         postscale_factor=postscale_factor, compression=compression)


def allgather(value: Reducible, name: str | None = None) -> tf.Tensor:
    """Return the values of all ranks, concatenated, as mpistrat.tensorflow.allgather does. Collective."""
    return ops.allgather(value, name=name)


def broadcast(value: Reducible, root_rank: int, name: str | None = None) -> tf.Tensor:
    """Return root_rank's `value` on every rank, as mpistrat.tensorflow.broadcast does. Collective."""
    return ops.broadcast(value, root_rank, name=name)


def reducescatter(value: Reducible, name: str | None = None, op: ReduceOp = Average) -> tf.Tensor:
    """Return this rank's rows of the reduction, as mpistrat.tensorflow.reducescatter does. Collective."""
    return ops.reducescatter(value, op=op, name=name)


@checked
def load_model(filepath: str | os.PathLike, custom_optimizers: Iterable[type[keras.optimizers.Optimizer]] | None = None,
               custom_objects: Mapping[str, object] | None = None, compression: type[Compressor] = Compression.none,
               legacy_opts: bool = False, average_aggregated_gradients: bool | None = None,
               **arguments: Any) -> keras.Model:
    """Load a Keras model and wrap the model's optimizer in DistributedOptimizer. The optimizer keeps its state. Local.

    The result is a Keras 2 model if tf.keras is Keras 2 (tf_keras, with TF_USE_LEGACY_KERAS=1), else a Keras 3 model.

    Args:
        filepath: As for keras.models.load_model.
        custom_optimizers: User-defined optimizer classes that the file refers to.
        custom_objects: As for keras.models.load_model.
        compression: One of Compression.
        legacy_opts: Accepted for compatibility with Horovod, ignored.
        average_aggregated_gradients: For an optimizer that accumulates gradients. True: an update takes their mean, as
            in Keras. False: an update takes their sum, as in a DistributedOptimizer with backward_passes_per_step.
            None: the mean, with a warning, because the file does not say which.
        arguments: Further arguments of DistributedOptimizer, such as `uneven` or `process_set`, which no file contains.
    """
    objects = {cls.__name__: cls for cls in custom_optimizers or ()} | dict(custom_objects or {})
    its_keras = tf.keras if is_keras2_in_use() else keras
    with its_keras.saving.custom_object_scope(objects):
        model = its_keras.models.load_model(filepath)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or distributed_in(optimizer):
            return model
        clone.replace_optimizer(model, DistributedOptimizer(optimizer, compression=compression, **arguments))
    steps = accumulated_passes(optimizer)
    if steps and average_aggregated_gradients is None:
        logger.warning("the optimizer of %s accumulates the gradients of %d passes, and the file does not say whether "
                       "an update takes their mean or their sum. Updates take the mean now. Give load_model "
                       "average_aggregated_gradients=True for the mean, or False for the sum.", filepath, steps)
    elif steps and not average_aggregated_gradients:
        model.optimizer._mpistrat.arguments.factor = float(steps)
    return model
