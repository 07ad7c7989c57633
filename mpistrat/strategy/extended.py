"""`strategy.extended`: the methods of a strategy that tf.distribute and Keras call. Each rank has one replica.

TensorFlow's class for several processes runs each replica in its own thread, so it cannot run collectives in branches
and loops. With one replica per process there is no such thread, and `merge_call` calls its function directly.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import tensorflow as tf
from tensorflow.python.distribute.distribute_lib import UpdateContext
from tensorflow.python.distribute.distribute_utils import (
    is_mirrored,
    is_sync_on_read,
    regroup,
    select_replica,
    update_regroup,
    validate_colocate_distributed_variable,
    value_container,
)
from tensorflow.python.distribute.values import DistributedVariable

from ..api import runtime
from ..core.errors import InvalidRequestError
from ..core.topology import Topology
from ..tensorflow.bridge.types import Structure, Tensor, TensorLike
from ..tensorflow.gradients import GradientOptions
from ..tensorflow.list_ops import Gradient, equal_parts, place_in, with_gradient
from ..tensorflow.xla import context as xla
from . import collectives, input
from .checkpoints import with_values_of
from .variables import RankMirroredVariable, Slots, is_everywhere

CommunicationOptions: TypeAlias = tf.distribute.experimental.CommunicationOptions
ReduceOp: TypeAlias = tf.distribute.ReduceOp | str
T = TypeVar("T")


class RankExtended(tf.compat.v1.distribute.StrategyExtended):
    """The `extended` attribute of an MPIStrategy. TensorFlow and Keras call its methods. Arguments: see MPIStrategy."""

    # Gradients are averaged here. DistributedOptimizer and DistributedGradientTape raise an error if this is set.
    averages_gradients = True
    # TensorFlow's handling of datasets that end earlier on some ranks, unless input.py switches the handling off.
    experimental_enable_get_next_as_optional = True
    # There is one device, so no function needs a trace per device.
    _retrace_functions_for_each_device = False

    def __init__(self, strategy: tf.distribute.Strategy, device: str, options: CommunicationOptions,
                 random_per_rank: bool, variables: str, gradient_options: GradientOptions):
        super().__init__(strategy)
        self._options, self.gradient_options = options, gradient_options
        self._device, self.random_per_rank = device, random_per_rank
        self.replicas_reduce = False  # Whether a replica has called all_reduce, perhaps for gradients
        self._known = runtime.current().topology
        self._input = input.Pipelines(strategy, lambda: self._topology, device)
        self.slots = Slots(strategy, variables)

    @property
    def _topology(self) -> Topology:
        """The topology (ranks and hosts) of the job, also after shutdown()."""
        if runtime.is_initialized():
            self._known = runtime.current().topology
        return self._known

    @property
    def _cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        return _resolver(self._topology)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> tf.Variable:
        colocated = kwargs.pop("colocate_with", None)
        device = self._device if colocated is None else colocated.device
        return self.slots.create(device, next_creator, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: tf.Variable) -> None:
        validate_colocate_distributed_variable(colocate_with_variable, self)

    def variable_created_in_scope(self, v: tf.Variable) -> bool:
        return getattr(v, "_distribute_strategy", None) is self._container_strategy()

    def read_var(self, v: DistributedVariable) -> tf.Tensor:
        """Return the aggregated value of `v`. Collective if `v` is synchronised on reading, else local."""
        return v._get_cross_replica() if is_sync_on_read(v) else tf.identity(v._get())

    value_container = staticmethod(value_container)

    def assigned_in_lockstep(self, variable: tf.Variable) -> None:
        """Declare that all ranks assign equal values to a variable, so its assignments need no broadcast from rank 0.

        Without this declaration each step would broadcast Keras' step counter (aggregation ONLY_FIRST_REPLICA).
        """
        variable.is_in_lockstep = True

    def _broadcast_to(self, tensor: TensorLike, destinations: object) -> TensorLike:
        if isinstance(tensor, float | int):
            return tensor
        if isinstance(destinations, RankMirroredVariable) and destinations.is_in_lockstep:
            return tensor
        return collectives.broadcast_from_first(tf.convert_to_tensor(tensor))

    # -- running and updating -----------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable[..., T], args: tuple, kwargs: dict[str, Any]) -> T:
        with RankReplicaContext(self._container_strategy(), replica_id_in_sync_group=self._topology.rank):
            return regroup((fn(*select_replica(0, args), **select_replica(0, kwargs)),))

    def _update(self, var: DistributedVariable, fn: Callable, args: tuple, kwargs: dict[str, Any], group: bool) -> Any:
        component = self.component(var)
        with tf.device(component.device), UpdateContext(0), tf.name_scope("update"):
            result = fn(component, *select_replica(0, args), **select_replica(0, kwargs))
        return update_regroup(self, (result,), group)

    def _replica_ctx_update(self, var: DistributedVariable, fn: Callable[..., T], args: tuple = (),
                            kwargs: dict[str, Any] | None = None, group: bool = True) -> T:
        component = self.component(var)
        with tf.device(component.device), tf.name_scope("update"):
            return fn(component, *args, **(kwargs or {}))

    def component(self, var: tf.Variable) -> tf.Variable:
        """Return this rank's component of a distributed variable. Raises ValueError: `var` is not distributed."""
        if not isinstance(var, DistributedVariable):
            raise ValueError(f"the variable {getattr(var, 'name', var)!r} was not created in this strategy's scope. "
                             "Create models, optimizers and variables under `with strategy.scope():`.")
        return var._get_replica(0)

    def _update_non_slot(self, colocate_with: object, fn: Callable, args: tuple, kwargs: dict[str, Any],
                         group: bool) -> Any:
        with tf.device(self._device), UpdateContext(0), tf.name_scope("update"):
            result = fn(*select_replica(0, args), **select_replica(0, kwargs))
        return update_regroup(self, (result,), group)

    def non_slot_devices(self, var_list: Sequence[tf.Variable]) -> tuple[str, ...]:
        return self.worker_devices

    # -- collectives --------------------------------------------------------------------------------------------------

    def _replica_ctx_all_reduce(self, reduce_op: ReduceOp, value: Structure,
                                options: CommunicationOptions | None = None) -> Structure:
        return tf.nest.pack_sequence_as(value, collectives.all_reduce(tf.nest.flatten(value), reduce_op_of(reduce_op),
                                                                      bucket_bytes=self.bucket_bytes(options)))

    def _reduce_to(self, reduce_op: ReduceOp, value: Structure, destinations: object,
                   options: CommunicationOptions | None) -> Structure:
        return tf.nest.pack_sequence_as(value, self._reduced(reduce_op, tf.nest.flatten(value), options))

    def _batch_reduce_to(self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[TensorLike, object]],
                         options: CommunicationOptions | None) -> list[Tensor]:
        return self._reduced(reduce_op, [value for value, _ in value_destination_pairs], options)

    def bucket_bytes(self, options: CommunicationOptions | None = None) -> int:
        """Return the bucket size for a call with `options`; 0: the default. Also apply the timeout in `options`."""
        if options is not None:
            apply_timeout(options)
        return int(self._options.merge(options).bytes_per_pack)

    def _reduced(self, reduce_op: ReduceOp, values: Sequence[TensorLike],
                 options: CommunicationOptions | None) -> list[Tensor]:
        op, results = reduce_op_of(reduce_op), [self.local(value) for value in values]
        # Averaging identical values is a no-op.
        sent = [i for i, value in enumerate(values) if op != tf.distribute.ReduceOp.MEAN or not is_mirrored(value)]
        reduced = collectives.all_reduce([results[i] for i in sent], op, "reduce",
                                         bucket_bytes=self.bucket_bytes(options))
        for i, result in zip(sent, reduced, strict=True):
            results[i] = result
        return results

    def local(self, value: object) -> Any:
        """Return this rank's part of a distributed value; of a distributed variable, the value of its component."""
        if isinstance(value, DistributedVariable):
            return value._get_replica(0).read_value()
        if isinstance(value, tf.distribute.DistributedValues):
            return self._container_strategy().experimental_local_results(value)[0]
        return value

    # The package mpistrat.keras, which this package imports, calls both.
    is_everywhere = staticmethod(is_everywhere)
    known_values = staticmethod(with_values_of)

    def _gather_to_implementation(self, value: TensorLike, destinations: object, axis: int,
                                  options: CommunicationOptions | None) -> tf.Tensor:
        return collectives.all_gather([self.local(value)], axis)[0]

    # -- input --------------------------------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None
                                         ) -> tf.distribute.DistributedDataset:
        return self._input.distribute(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: tf.distribute.InputOptions | None
                                           ) -> tf.distribute.DistributedDataset:
        return self._input.distribute_from_function(dataset_fn, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> tf.distribute.DistributedValues:
        value = value_fn(tf.distribute.experimental.ValueContext(self._topology.rank, self._topology.size))
        return regroup((value,), always_wrap=True)

    # -- properties ---------------------------------------------------------------------------------------------------

    # Each rank runs its own program, and initialises its own variables.
    experimental_between_graph = experimental_should_init = True
    _global_batch_size = True
    _num_devices_per_worker = 1

    @property
    def worker_devices(self) -> tuple[str, ...]:
        return (self._device,)

    parameter_devices = worker_devices

    @property
    def should_checkpoint(self) -> bool:
        return self._topology.rank == 0

    should_save_summary = should_checkpoint

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._topology.size

    def _in_multi_worker_mode(self) -> bool:
        return self._topology.size > 1

    # Keras 2 and KerasTuner read these private attributes of TensorFlow's strategies with several workers.
    @property
    def _task_type(self) -> str:
        return str(self._cluster_resolver.task_type)

    @property
    def _task_id(self) -> int:
        return self._topology.rank

    def _use_merge_call(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self._topology.rank

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id + self._topology.rank


@functools.cache
def _resolver(topology: Topology) -> tf.distribute.cluster_resolver.ClusterResolver:
    """Return a ClusterResolver whose workers are all ranks. Worker 0 is the chief.

    The cluster has no job "chief", as with TensorFlow's own strategies: some programs know only the job "worker".
    No server listens at the addresses. MPIClusterResolver, in contrast, forms a cluster of servers.
    """
    alone = len(topology.hosts) == 1
    workers = [f"{'localhost' if alone else host}:0" for host in topology.host_of]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=topology.rank,
        num_accelerators={"GPU": len(tf.config.list_logical_devices("GPU"))})


def apply_timeout(options: CommunicationOptions) -> None:
    """If `options` have a timeout, make it the engine's stall limit for all later collectives."""
    if options.timeout_seconds is not None:
        if options.timeout_seconds <= 0:
            raise InvalidRequestError("CommunicationOptions.timeout_seconds must be above 0. "
                                      f"Received: {options.timeout_seconds!r}")
        runtime.current().engine.controller.abort_stalls_after(float(options.timeout_seconds),
                                                               "CommunicationOptions.timeout_seconds")


# -- the replica context, which tf.distribute.get_replica_context() returns in strategy.run ----------------------------


class RankReplicaContext(tf.distribute.ReplicaContext):
    """TensorFlow's replica context, with all_reduce and all_gather replaced. Other methods call `strategy.extended`."""

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Structure,
                   options: CommunicationOptions | None = None) -> Structure:
        """Reduce over the replicas. Collective, differentiable.

        This replaces TensorFlow's method, which keeps each graph that calls it alive until the process ends.

        Args:
            reduce_op: tf.distribute.ReduceOp, or its name.
            value: A tensor or a nested structure of tensors.
            options: tf.distribute.experimental.CommunicationOptions.
        """
        if not tf.nest.flatten(value):
            return super().all_reduce(reduce_op, value, options)
        extended = self.strategy.extended  # Scalars are losses and counts, and no gradients.
        extended.replicas_reduce |= any(getattr(each, "shape", ()) != () for each in tf.nest.flatten(value))
        return extended._replica_ctx_all_reduce(reduce_op, value, options)

    def all_gather(self, value: Structure, axis: int, options: CommunicationOptions | None = None) -> Structure:
        """Concatenate the replicas' values along `axis`. The sizes of `axis` may differ. Collective, differentiable.

        TensorFlow's method is differentiable for equal shapes only.

        Args:
            value: A tensor or a nested structure of tensors.
            axis: A number, the same on all ranks.
            options: tf.distribute.experimental.CommunicationOptions; ignored.

        Raises NotImplementedError: For tf.IndexedSlices. ValueError: For a scalar.
        """
        flat = tf.nest.flatten(value)
        if any(isinstance(v, tf.IndexedSlices) for v in flat):
            raise NotImplementedError("all_gather does not support IndexedSlices")
        tensors = [tf.convert_to_tensor(v) for v in flat]
        results = with_gradient(lambda values: collectives.all_gather(values, axis), AllGatherGradient(axis),
                                tensors) if tensors else []
        return tf.nest.pack_sequence_as(value, results)


def reduce_op_of(op: tf.distribute.ReduceOp | str) -> tf.distribute.ReduceOp:
    return tf.distribute.ReduceOp(op.upper()) if isinstance(op, str) else op


@dataclass(frozen=True)
class AllGatherGradient(Gradient):
    """The gradient of an all-gather: upstream gradients are summed, and each replica takes its own slice of the sum."""

    axis: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        joined = collectives.all_reduce(upstream, tf.distribute.ReduceOp.SUM)
        if xla.is_compiled():
            return equal_parts(joined, values, "all_gather", axis=self.axis)
        own = tf.stack([tf.shape(v)[self.axis] for v in values])
        before = tf.reduce_sum(collectives.all_gather([own[tf.newaxis]], 0)[0][:place_in(0)[0]], 0)
        return [tf.gather(whole, tf.range(before[i], before[i] + own[i]), axis=self.axis)
                for i, whole in enumerate(joined)]
