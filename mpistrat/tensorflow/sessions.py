"""For graphs of tf.compat.v1 sessions: a DistributedOptimizer for tf.compat.v1 optimizers, and variable broadcasts.

Users call mpistrat.tensorflow.DistributedOptimizer. The call is local; running the train operation is collective.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from ..api.process_sets import ProcessSet, global_process_set, resolved
from ..core.errors import InvalidRequestError
from ..core.request import Adasum, Average, ReduceOp, ScaledOp, resolve_op
from .bridge import names
from .bridge.arguments import checked
from .bridge.program_order import session_graph
from .bridge.types import OptionalGradient, Variable
from .compression import Compression, Compressor
from .gradients import GradientGroups, GradientOptions, GradientReducer, Groups
from .graph.buckets import ReduceSpec
from .kerases import label_of
from .list_ops import reduce_tensors, with_unique_rows
from .ops import broadcast_variables

v1 = tf.compat.v1
_Pairs = list[tuple[OptionalGradient, Variable]]


def for_sessions_too(of_keras: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `of_keras`; for optimizers of tf.compat.v1 it calls DistributedOptimizer instead."""
    @wraps(of_keras)
    def distributed(optimizer: object, *args: object, **kwargs: object) -> Any:
        is_of_v1 = isinstance(optimizer, v1.train.Optimizer) or (
            hasattr(optimizer, "compute_gradients") and not hasattr(optimizer, "get_config"))
        made: Callable[..., Any] = DistributedOptimizer if is_of_v1 else of_keras
        return made(optimizer, *args, **kwargs)
    return distributed


class DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer whose compute_gradients returns gradients that are averaged over the ranks.

    All ranks must make their optimizers in the same order.

    Args:
        optimizer: An optimizer of tf.compat.v1, or another object with compute_gradients and apply_gradients.
        name: The name of the new optimizer; default: "Distributed" and the class name of `optimizer`.
        use_locking: As for optimizers of tf.compat.v1.
        device_dense, device_sparse: Accepted for compatibility with Horovod, ignored.
        compression: One of Compression.
        sparse_as_dense: Convert tf.IndexedSlices to dense tensors first.
        backward_passes_per_step: The number k of passes whose gradients are summed. The sum is averaged and applied.
        op: Average, Sum or Adasum. Adasum combines the changes that each rank's optimizer makes to the variables.
        gradient_predivide_factor: Splits the division by the number of ranks N: by this factor before the sum, and by
            N / factor after it. Average only.
        average_aggregated_gradients: Divide the sum of k gradients by k.
        num_groups: Deprecated form of `groups`.
        groups: The gradients that are reduced together, as for Keras optimizers.
        process_set: The ranks that take part. On other ranks gradients do not change.
        scale_local_gradients: Whether gradients that are excluded by `register_local_var` are divided by N.
        check_weights: Whether the first reductions check that the ranks train the same weights.

    Raises:
        ValueError: `optimizer` is distributed already or has no compute_gradients, or an argument is out of range.
    """

    @checked
    def __init__(self, optimizer: tf.compat.v1.train.Optimizer, name: str | None = None, use_locking: bool = False,
                 device_dense: str = "", device_sparse: str = "", compression: type[Compressor] = Compression.none,
                 sparse_as_dense: bool = False, backward_passes_per_step: int = 1, op: ReduceOp = Average,
                 gradient_predivide_factor: float = 1.0, average_aggregated_gradients: bool = False,
                 num_groups: int = 0, groups: Groups = None, process_set: ProcessSet = global_process_set,
                 scale_local_gradients: bool = True, check_weights: bool = True):
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        if isinstance(optimizer, DistributedOptimizer):
            raise InvalidRequestError("the optimizer is distributed already. Pass the optimizer that it was made from.")
        if not hasattr(optimizer, "compute_gradients"):
            raise InvalidRequestError("in the graph of a session, DistributedOptimizer takes an optimizer of "
                                      f"tf.compat.v1.train. Received: {optimizer!r}")
        self._is_adasum = resolve_op(op, None) is Adasum
        if self._is_adasum and backward_passes_per_step > 1:
            raise InvalidRequestError("op=Adasum does not support backward_passes_per_step > 1. Pass only one of them.")
        self._optimizer = optimizer
        self._compression = compression
        options = GradientOptions(compression, sparse_as_dense, GradientGroups(groups, num_groups))
        process_set = resolved(process_set)
        self._reducer = GradientReducer(names.OptimizerName(process_set.process_set_id or 0), options,
                                        Average if self._is_adasum else op, gradient_predivide_factor,
                                        scale_local_gradients, process_set)
        self._reducer.checks_weights = check_weights
        self._passes = None if backward_passes_per_step == 1 else _Passes(
            backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)

    def register_local_var(self, variable: Variable) -> None:
        """Exclude this variable's gradients from the averaging."""
        self._reducer.register_local(variable)

    def compute_gradients(self, *args: object, **kwargs: object) -> _Pairs:
        """Call the optimizer's compute_gradients, and average the gradients. Collective when the graph runs."""
        pairs: _Pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._is_adasum or not pairs:
            return pairs
        gradients, variables = map(list, zip(*pairs, strict=True))
        reduce = partial(self._reducer.reduce, variables=variables)
        reduced = reduce(gradients) if self._passes is None else self._passes.reduced(gradients, reduce)
        # TensorFlow's gradient descent adds repeated rows in several threads, in another order on each rank.
        unique = [with_unique_rows(each) if isinstance(each, tf.IndexedSlices) else each for each in reduced]
        return list(zip(unique, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Iterable[tuple[OptionalGradient, Variable]],
                        global_step: Variable | None = None, name: str | None = None) -> tf.Operation:
        """Call the optimizer's apply_gradients. With Adasum, the operation is collective when it runs."""
        pairs: _Pairs = list(grads_and_vars)
        if self._is_adasum:
            return self._apply_adasum(pairs, global_step, name)
        apply = partial(self._optimizer.apply_gradients, pairs, global_step=global_step, name=name)
        return apply() if self._passes is None else self._passes.applied(apply, global_step)

    def _apply_adasum(self, pairs: _Pairs, global_step: Variable | None, name: str | None) -> tf.Operation:
        """Apply this rank's gradients, and then replace the changes of the variables by the Adasum over all ranks."""
        changed = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        number = self._reducer.process_set.process_set_id or 0
        if not self._reducer.process_set.has_others() or not changed:
            return self._optimizer.apply_gradients(pairs, global_step=global_step, name=name)
        variables: list[tf.Variable] = [variable for _, variable in changed]
        with tf.init_scope():
            before = [self._zeros_slot(variable, "before", self._name) for variable in variables]
        with tf.control_dependencies([gradient for gradient, _ in changed]):
            kept = [v1.assign(start, variable) for start, variable in zip(before, variables, strict=True)]
        with tf.control_dependencies(kept):
            applied = self._optimizer.apply_gradients(pairs, global_step=global_step)
        with tf.control_dependencies([applied]):
            starts = [start.read_value() for start in before]
            changes = [variable.read_value() - start for start, variable in zip(starts, variables, strict=True)]
        spec = ReduceSpec(names.of(self._reducer.name, number), ScaledOp(Adasum), list(map(label_of, variables)),
                          process_set=number)
        reduced = reduce_tensors(changes, spec, self._compression)
        return tf.group(*[v1.assign(variable, start + change) for variable, start, change in
                          zip(variables, starts, reduced, strict=True)], name=name)

    def get_slot(self, var: Variable, name: str) -> Any:
        """Call the optimizer's get_slot."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> Any:
        """Call the optimizer's get_slot_names."""
        return self._optimizer.get_slot_names()

    def variables(self) -> Any:
        """Call the optimizer's variables."""
        return self._optimizer.variables()


class _Passes:
    """Sums the gradients of k passes. Every k-th pass reduces and applies the sum.

    As in Horovod, the sums are local variables. A MonitoredSession or local_variables_initializer() initializes them.
    `is_averaged`: Whether the sum is divided by k. `is_dense`: Whether tf.IndexedSlices are converted to dense tensors.
    """

    def __init__(self, passes: int, is_averaged: bool, is_dense: bool):
        self._passes, self._is_averaged, self._is_dense = passes, is_averaged, is_dense
        self._is_last: tf.Tensor | None = None

    def reduced(self, gradients: Sequence[OptionalGradient],
                reduce: Callable[[Sequence[OptionalGradient]], list[OptionalGradient]]) -> list[OptionalGradient]:
        """Return the reduced sums in every k-th pass, and in other passes the sums so far, which must not be applied.

        Raises InvalidRequestError: A gradient is a tf.IndexedSlices, and `is_dense` is False.
        """
        if not self._is_dense and any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            raise InvalidRequestError("backward_passes_per_step needs dense gradients. Pass sparse_as_dense=True too.")
        places = [i for i, gradient in enumerate(gradients) if gradient is not None]
        dense = [tf.convert_to_tensor(gradients[i]) for i in places]
        count = _local_variable(tf.zeros([], tf.int32), "passes")
        sums = [_local_variable(tf.zeros(gradient.shape, gradient.dtype), "sum") for gradient in dense]
        added = [total.assign_add(gradient) for total, gradient in zip(sums, dense, strict=True)]
        with tf.control_dependencies(added):
            self._is_last = tf.equal(count.assign_add(1) % self._passes, 0)

        def end() -> list[tf.Tensor]:
            values = [total.read_value() for total in sums]
            if self._is_averaged:
                values = [value / self._passes for value in values]
            whole = list(gradients)
            for i, value in zip(places, values, strict=True):
                whole[i] = value
            reduced = reduce(whole)
            results = [reduced[i] for i in places]
            with tf.control_dependencies(results):
                cleared = [total.assign(tf.zeros_like(total)) for total in sums]
            with tf.control_dependencies(cleared):
                return [tf.identity(result) for result in results]

        results = tf.nest.flatten(tf.cond(self._is_last, end, lambda: [tf.identity(total) for total in added]))
        found = list(gradients)
        for i, result in zip(places, results, strict=True):
            found[i] = result
        return found

    def applied(self, apply: Callable[[], tf.Operation], global_step: Variable | None) -> tf.Operation:
        """Return an operation: every k-th pass applies gradients by `apply()`; the others only increment `global_step`.

        Raises InvalidRequestError: compute_gradients was not called before.
        """
        if self._is_last is None:
            raise InvalidRequestError("apply_gradients was called too early. Call compute_gradients first.")

        def count() -> Any:
            return tf.no_op() if global_step is None else v1.assign_add(global_step, 1)

        def after(made: tf.Operation) -> tf.Tensor:
            with tf.control_dependencies([made]):
                return tf.constant(True)

        return tf.cond(self._is_last, lambda: after(apply()), lambda: after(count())).op


def _local_variable(initial: tf.Tensor, name: str) -> Any:
    return v1.Variable(initial, trainable=False, name=name, use_resource=True,
                       collections=[v1.GraphKeys.LOCAL_VARIABLES])


# -- broadcast of variables -------------------------------------------------------------------------------------------

_TEXT = ("{name} works only in the graph of a tf.compat.v1 session, and no such graph is active. Call "
         "broadcast_variables(variables, root_rank) after the variables have been created, or pass callbacks."
         "BroadcastGlobalVariablesCallback(root_rank) of mpistrat.keras to fit().")


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return the operation that assigns root_rank's values to all global variables of the graph. Collective when run.

    Raises:
        RuntimeError: The caller is not in the graph of a tf.compat.v1 session. Use broadcast_variables.
    """
    if session_graph() is None:
        raise RuntimeError(_TEXT.format(name="broadcast_global_variables()"))
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all global variables when a MonitoredSession has initialized or restored them. Collective.

    Args:
        root_rank: The rank whose values all ranks get.
        device: Accepted for compatibility with Horovod, ignored.
        process_set: The ranks that take part; `root_rank` is one of them.

    Raises:
        RuntimeError: The hook begins outside of the graph of a tf.compat.v1 session.
    """

    @checked
    def __init__(self, root_rank: int, device: str = "", process_set: ProcessSet = global_process_set):
        self._root_rank, self._process_set = root_rank, process_set
        self._broadcast: tf.Operation | None = None

    def begin(self) -> None:
        """Create the broadcast operation in the graph of the session."""
        if session_graph() is None:
            raise RuntimeError(_TEXT.format(name="BroadcastGlobalVariablesHook"))
        graph = tf.compat.v1.get_default_graph()
        if self._broadcast is None or self._broadcast.graph is not graph:
            self._broadcast = broadcast_variables(tf.compat.v1.global_variables(), self._root_rank, self._process_set)

    def after_create_session(self, session: tf.compat.v1.Session, coord: object) -> None:
        """Run the broadcast. Collective."""
        session.run(self._broadcast)
