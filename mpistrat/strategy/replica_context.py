"""The replica context, which tf.distribute.get_replica_context() returns in strategy.run. A rank runs one replica.

extended.py creates the context. Users call its methods, most of which are collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from ..tensorflow.bridge.types import Structure
from ..tensorflow.list_ops import Gradient, equal_parts, place_in, with_gradient
from ..tensorflow.xla import context as xla
from . import collectives
from .options import CommunicationOptions


class RankReplicaContext(tf.distribute.ReplicaContext):
    """TensorFlow's replica context with two replaced collectives. The other methods call `strategy.extended`."""

    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: Structure,
                   options: CommunicationOptions | None = None) -> Structure:
        """Reduce over the replicas. Collective, differentiable.

        It replaces TensorFlow's method, which keeps each graph that calls it alive until the process ends.

        Args:
            reduce_op: tf.distribute.ReduceOp, or its name.
            value: A tensor or a nested structure of tensors.
            options: tf.distribute.experimental.CommunicationOptions.
        """
        if not tf.nest.flatten(value):
            return super().all_reduce(reduce_op, value, options)
        return self.strategy.extended._replica_ctx_all_reduce(reduce_op, value, options)

    def all_gather(self, value: Structure, axis: int, options: CommunicationOptions | None = None) -> Structure:
        """Concatenate the replicas' values along `axis`. The sizes of `axis` may differ. Collective, differentiable.

        TensorFlow's method is differentiable for equal shapes only.

        Args:
            value: A tensor or a nested structure of tensors.
            axis: A number, the same on all ranks.
            options: tf.distribute.experimental.CommunicationOptions; ignored.

        Raises:
            NotImplementedError: For tf.IndexedSlices.
            ValueError: For a scalar.
        """
        flat = tf.nest.flatten(value)
        if any(isinstance(v, tf.IndexedSlices) for v in flat):
            raise NotImplementedError("all_gather does not support IndexedSlices")
        tensors = [tf.convert_to_tensor(v) for v in flat]

        results = with_gradient(lambda values: collectives.all_gather(values, axis), AllGatherGradient(axis),
                                tensors) if tensors else []
        return tf.nest.pack_sequence_as(value, results)


def reduce_op_of(op: tf.distribute.ReduceOp | str) -> tf.distribute.ReduceOp:
    """Return `op`, or the operation with this name."""
    return tf.distribute.ReduceOp(op.upper()) if isinstance(op, str) else op


@dataclass(frozen=True)
class AllGatherGradient(Gradient):
    """The gradient of an all-gather: this replica's part of the upstream gradient summed over the replicas."""

    axis: int

    def of(self, values: Sequence[tf.Tensor], upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        joined = collectives.all_reduce(upstream, tf.distribute.ReduceOp.SUM)
        if xla.is_compiled():
            return equal_parts(joined, values, "all_gather", axis=self.axis)
        own = tf.stack([tf.shape(v)[self.axis] for v in values])
        before = tf.reduce_sum(collectives.all_gather([own[tf.newaxis]], 0)[0][:place_in(0)[0]], 0)
        return [tf.gather(whole, tf.range(before[i], before[i] + own[i]), axis=self.axis)
                for i, whole in enumerate(joined)]
