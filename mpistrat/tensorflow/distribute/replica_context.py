"""The context of the one replica that a rank runs: what tf.distribute.get_replica_context() is in strategy.run."""

from typing import Any

import tensorflow as tf

from ..ops import with_gradient
from . import collectives


class RankReplicaContext(tf.distribute.ReplicaContext):
    """all_reduce, merge_call and the rest are TensorFlow's; they call the strategy's `extended`, also in branches."""

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

        def gathered(*values: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                return self._own_parts(self.all_reduce(tf.distribute.ReduceOp.SUM, list(upstream)), values, axis)
            return collectives.all_gather(values, axis), gradient

        results = with_gradient(gathered, *tensors) if tensors else []
        return tf.nest.pack_sequence_as(value, results if isinstance(results, list | tuple) else [results])

    def _own_parts(self, joined: list[tf.Tensor], like: Any, axis: int) -> list[tf.Tensor]:
        """Of each joined tensor the part that this replica brought, which is as long as that in `like`."""
        own = tf.stack([tf.shape(v)[axis] for v in like])
        before = tf.reduce_sum(collectives.all_gather([own[tf.newaxis]], 0)[0][:self.replica_id_in_sync_group], 0)
        return [tf.gather(whole, tf.range(before[i], before[i] + own[i]), axis=axis) for i, whole in enumerate(joined)]
