"""What tf.distribute calls under the names of `strategy.extended`: one replica here, and as many as there are ranks.

TensorFlow's own class for several processes cannot run collectives in branches and loops, since it runs each replica
in a thread of its own. With one replica per process there is no need for threads, and `merge_call` is a plain call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from ...api import runtime
from .._private import (
    DistributedValues,
    DistributedVariable,
    UpdateContext,
    is_mirrored,
    is_sync_on_read,
    regroup,
    select_replica,
    update_regroup,
    validate_colocate_distributed_variable,
    value_container,
)
from . import collectives, input
from .central import Slots
from .options import apply_timeout, bucket_bytes
from .replica_context import RankReplicaContext
from .variables import RankMirroredVariable


class RankExtended(tf.compat.v1.distribute.StrategyExtended):
    """The extended part of MPIStrategy. Its methods are called by TensorFlow and Keras.

    Args:
        strategy: The strategy that this is a part of.
        device: Where variables and computation are.
        options: tf.distribute.experimental.CommunicationOptions, the default for all collectives.
        cluster_resolver: What `strategy.cluster_resolver` is.
        random_per_rank: Whether Keras' layers draw other random numbers on each rank.
        central: Whether the chief alone keeps the optimizers' slots.
    """

    # Gradients are averaged here; DistributedOptimizer and DistributedGradientTape look at this, and refuse.
    averages_gradients = True
    # TensorFlow's handling of datasets that end earlier on some ranks, where input.py does not switch it off.
    experimental_enable_get_next_as_optional = True
    # A function that is called with other devices need not be traced again: there is one.
    _retrace_functions_for_each_device = False

    def __init__(self, strategy: tf.distribute.Strategy, device: str, options: Any, cluster_resolver: Any,
                 random_per_rank: bool, central: bool):
        super().__init__(strategy)
        self._options = options
        self._device, self._cluster_resolver, self.random_per_rank = device, cluster_resolver, random_per_rank
        topology = runtime.current().topology
        self._rank, self._size = topology.rank, topology.size
        self._input = input.Pipelines(strategy, self._rank, self._size, device)
        self.slots = Slots(strategy, central)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        colocated = kwargs.pop("colocate_with", None)
        device = self._device if colocated is None else colocated.device
        return self.slots.create(device, next_creator, **kwargs)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        validate_colocate_distributed_variable(colocate_with_variable, self)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether `v` is a variable of this strategy."""
        return getattr(v, "_distribute_strategy", None) is self._container_strategy()

    def read_var(self, v: Any) -> tf.Tensor:
        """The aggregated value. Collective for variables that are synchronised on reading."""
        return v._get_cross_replica() if is_sync_on_read(v) else tf.identity(v._get())

    def value_container(self, value: Any) -> Any:
        """The distributed variable that `value` is a component of, or `value`."""
        return value_container(value)

    def assigned_in_lockstep(self, variable: Any) -> None:
        """Say that the ranks assign equal values to a variable of ONLY_FIRST_REPLICA, and none need be sent.

        Keras counts its optimizer's steps in such a variable: that would be a broadcast in every step.
        """
        variable.is_in_lockstep = True

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        if isinstance(tensor, float | int):
            return tensor
        if isinstance(destinations, RankMirroredVariable) and destinations.is_in_lockstep:
            return tensor
        return collectives.broadcast_from_first(tf.convert_to_tensor(tensor))

    # -- running and updating -----------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable, args: Any, kwargs: Any) -> Any:
        with RankReplicaContext(self._container_strategy(), replica_id_in_sync_group=self._rank):
            return regroup((fn(*select_replica(0, args), **select_replica(0, kwargs)),))

    def _update(self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool) -> Any:
        component = self.component(var)
        with tf.device(component.device), UpdateContext(0), tf.name_scope("update"):
            result = fn(component, *select_replica(0, args), **select_replica(0, kwargs))
        return update_regroup(self, (result,), group)

    def _replica_ctx_update(self, var: Any, fn: Callable, args: Any = (), kwargs: Any = None,
                            group: bool = True) -> Any:
        component = self.component(var)
        with tf.device(component.device), tf.name_scope("update"):
            return fn(component, *args, **(kwargs or {}))

    def component(self, var: Any) -> Any:
        """This rank's part of a distributed variable. Raises ValueError for any other variable."""
        if not isinstance(var, DistributedVariable):
            raise ValueError(f"the variable {getattr(var, 'name', var)!r} was not created in this strategy's scope. "
                             "Create models, optimizers and variables under `with strategy.scope():`.")
        return var._get_replica(0)

    def _update_non_slot(self, colocate_with: Any, fn: Callable, args: Any, kwargs: Any, group: bool) -> Any:
        with tf.device(self._device), UpdateContext(0), tf.name_scope("update"):
            result = fn(*select_replica(0, args), **select_replica(0, kwargs))
        return update_regroup(self, (result,), group)

    def non_slot_devices(self, var_list: Any) -> tuple[str, ...]:
        """The one device."""
        return self.worker_devices

    # -- collectives --------------------------------------------------------------------------------------------------

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return tf.nest.pack_sequence_as(value, collectives.all_reduce(tf.nest.flatten(value), _op(reduce_op),
                                                                      bucket_bytes=self.bucket_bytes(options)))

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        return tf.nest.pack_sequence_as(value, self._reduced(reduce_op, tf.nest.flatten(value), options))

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        return self._reduced(reduce_op, [value for value, _ in value_destination_pairs], options)

    def bucket_bytes(self, options: Any = None) -> int:
        """The size of the buckets of a call with options of its own, or None. A timeout in those is applied."""
        if options is not None:
            apply_timeout(options)
        return bucket_bytes(self._options.merge(options))

    def _reduced(self, reduce_op: Any, values: Sequence[Any], options: Any) -> list[Any]:
        op = _op(reduce_op)
        # The mean of what is equal on all ranks is that.
        equal = [op == tf.distribute.ReduceOp.MEAN and is_mirrored(value) for value in values]
        results = [self.local(value) for value in values]
        sent = [i for i, is_equal in enumerate(equal) if not is_equal]
        reduced = collectives.all_reduce([results[i] for i in sent], op, "reduce",
                                         bucket_bytes=self.bucket_bytes(options))
        for i, result in zip(sent, reduced, strict=True):
            results[i] = result
        return results

    def local(self, value: Any) -> Any:
        """This rank's part of a distributed value, or of a distributed variable the value here."""
        if isinstance(value, DistributedVariable):
            return value._get_replica(0).read_value()
        return value._values[0] if isinstance(value, DistributedValues) else value

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: int, options: Any) -> tf.Tensor:
        return collectives.all_gather([self.local(value)], axis)[0]

    # -- input --------------------------------------------------------------------------------------------------------

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return self._input.distribute(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable, options: Any) -> Any:
        return self._input.distribute_from_function(dataset_fn, options)

    def _experimental_distribute_values_from_function(self, value_fn: Callable) -> Any:
        value = value_fn(tf.distribute.experimental.ValueContext(self._rank, self._size))
        return regroup((value,), always_wrap=True)

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of the replica here."""
        return (self._device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Where the variables are: on the same device."""
        return (self._device,)

    @property
    def worker_devices_by_replica(self) -> list[list[str]]:
        """The devices of each replica here."""
        return [[self._device]]

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._size

    @property
    def _num_devices_per_worker(self) -> int:
        return 1

    @property
    def _global_batch_size(self) -> bool:
        return True

    def _in_multi_worker_mode(self) -> bool:
        return self._size > 1

    def _use_merge_call(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return replica_id_in_sync_group - self._rank

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        return replica_id + self._rank

    @property
    def experimental_between_graph(self) -> bool:
        """Each rank has a program of its own."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Each rank initialises its own variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """The chief writes checkpoints."""
        return self._rank == 0

    @property
    def should_save_summary(self) -> bool:
        """The chief writes summaries."""
        return self._rank == 0


def _op(reduce_op: Any) -> tf.distribute.ReduceOp:
    return tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
