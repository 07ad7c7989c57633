"""The same small training under the strategy of a name: prints the loss and the norm of the weights on every rank.

    strategy_by_name.py NAME [ROLE=COUNT ...]
"""

import sys

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd
from tests.scripts.reporting import attempt

name, *counts = sys.argv[1:]
options = {"jobs": {role: int(count) for role, _, count in (word.partition("=") for word in counts)}} if counts else {}


def train() -> str:
    """Gradient descent with momentum, which the loop itself keeps."""
    strategy = hvd.strategy(name, **options)
    x = np.random.default_rng(0).standard_normal((48, 3)).astype(np.float32)
    batches = tf.data.Dataset.from_tensor_slices((x, np.tanh(x.sum(1)))).batch(12)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([3]))
        momenta = tf.Variable(tf.zeros([3]))

    def replica_step(rows: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = (tf.linalg.matvec(rows, weights) - targets) ** 2
            loss = tf.nn.compute_average_loss(losses, global_batch_size=12)
        gradient = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        momenta.assign(0.9 * momenta - 0.1 * gradient)
        weights.assign_add(momenta)
        return loss

    @tf.function
    def step(batch: tuple) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    losses = [float(step(batch)) for _ in range(3) for batch in strategy.experimental_distribute_dataset(batches)]
    return f"{losses[-1]:.5f} {np.linalg.norm(weights.numpy()):.5f}"


attempt(train)
