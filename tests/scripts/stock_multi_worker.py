"""TensorFlow's MultiWorkerMirroredStrategy over the ranks: a sum, and a variable that begins as the chief's."""

import tensorflow as tf
from reporting import say

import mpistrat.tensorflow as hvd

hvd.init()
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=hvd.MPIClusterResolver())
with strategy.scope():
    variable = tf.Variable(float(hvd.rank()))


@tf.function
def total() -> tf.Tensor:
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(hvd.rank() + 1.0)))


say(f"sum {total().numpy()} of {strategy.num_replicas_in_sync}, variable {variable.numpy()}")
