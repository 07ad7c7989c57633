"""The context of the one replica that a rank runs: what tf.distribute.get_replica_context() is in strategy.run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from ...api import runtime
from ..bridge.differentiable import Gradient, with_gradient
from . import collectives

_SUM = tf.distribute.ReduceOp.SUM


class RankReplicaContext(tf.distribute.ReplicaContext):
    """merge_call and the rest are TensorFlow's; they call the strategy's `extended`, also in branches."""

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduce over the replicas. Collective, differentiable, but for tf.IndexedSlices.

        As TensorFlow's own, of which each call in a graph would keep the graph for as long as the process lives.

        Args:
            reduce_op: tf.distribute.ReduceOp, or its name.
            value: A tensor or a nested structure of tensors.
            options: tf.distribute.experimental.CommunicationOptions.
        """
        op = tf.distribute.ReduceOp(reduce_op.upper()) if isinstance(reduce_op, str) else reduce_op
        flat = tf.nest.flatten(value)
        if not flat or any(isinstance(v, tf.IndexedSlices) for v in flat):
            return super().all_reduce(op, value, options)
        extended = self.strategy.extended
        results = with_gradient(lambda *values: extended._replica_ctx_all_reduce(op, list(values), options),
                                AllReduceGradient(op.value), [tf.convert_to_tensor(v) for v in flat])
        return tf.nest.pack_sequence_as(value, results)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Join the replicas' values along `axis`, in which they may differ. Collective, differentiable.

        TensorFlow's own has a gradient for values of one shape only.

        Args:
            value: A tensor or a nested structure of tensors.
            axis: A number, the same on all ranks.
            options: tf.distribute.experimental.CommunicationOptions; there is nothing in it to choose here.

        Raises:
            NotImplementedError: For tf.IndexedSlices.
            ValueError: For a scalar.
        """
        flat = tf.nest.flatten(value)
        if any(isinstance(v, tf.IndexedSlices) for v in flat):
            raise NotImplementedError("all_gather does not support IndexedSlices")
        tensors = [tf.convert_to_tensor(v) for v in flat]

        results = with_gradient(lambda *values: collectives.all_gather(values, axis), AllGatherGradient(axis),
                                tensors) if tensors else []
        return tf.nest.pack_sequence_as(value, results)


@dataclass(frozen=True)
class AllReduceGradient(Gradient):
    """Reduced as the value was; `op` is the value of a tf.distribute.ReduceOp."""

    op: str

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        op = tf.distribute.ReduceOp(self.op)
        return with_gradient(lambda *tensors: collectives.all_reduce(tensors, op), self, upstream)


@dataclass(frozen=True)
class AllGatherGradient(Gradient):
    """Of each sum over the replicas the part that this one brought."""

    axis: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        joined = with_gradient(lambda *tensors: collectives.all_reduce(tensors, _SUM), AllReduceGradient(_SUM.value),
                               upstream)
        own = tf.stack([tf.shape(v)[self.axis] for v in values])
        before = tf.reduce_sum(collectives.all_gather([own[tf.newaxis]], 0)[0][:runtime.current().topology.rank], 0)
        return [tf.gather(whole, tf.range(before[i], before[i] + own[i]), axis=self.axis)
                for i, whole in enumerate(joined)]
