"""One rank leaves the training loop of a strategy early, and the others are told."""

import tensorflow as tf

import mpistrat
from mpistrat.tensorflow import MPIStrategy

strategy = MPIStrategy()


@tf.function
def step() -> tf.Tensor:
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))


for i in range(4):
    if i == 2 and mpistrat.rank() == 0:
        break
    step()
print(f"rank {mpistrat.rank()}: done", flush=True)
