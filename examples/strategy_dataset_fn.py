"""Each rank makes its own input with a dataset function: distribute_datasets_from_function, without Keras.

    python examples/strategy_dataset_fn.py
    mpirun -np 2 python examples/strategy_dataset_fn.py

It fits a linear map to synthetic points. The points and the result are the same for any number of ranks.
"""

import argparse

import numpy as np
import tensorflow as tf

import mpistrat
from mpistrat.tensorflow import MPIStrategy

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=48,
                    help="points of all ranks together in a step, a multiple of the ranks (default: 48)")
parser.add_argument("--learning-rate", type=float, default=0.1)
args = parser.parse_args()

strategy = MPIStrategy()
wanted = np.array([1.0, -2.0, 0.5], np.float32)
points = np.random.default_rng(0).standard_normal((960, 3)).astype(np.float32)


def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """The batches of one rank: its share of the points, and of the global batch."""
    batch_size = context.get_per_replica_batch_size(args.batch_size)
    dataset = tf.data.Dataset.from_tensor_slices((points, points @ wanted))
    dataset = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
    return dataset.batch(batch_size).prefetch(2)


distributed = strategy.distribute_datasets_from_function(dataset_fn)
with strategy.scope():
    weights = tf.Variable(tf.zeros([3]))


def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """A step of gradient descent on all ranks' points; the sum of the squared errors of this rank's."""
    with tf.GradientTape() as tape:
        squares = (tf.linalg.matvec(x, weights) - y) ** 2
        loss = tf.nn.compute_average_loss(squares, global_batch_size=args.batch_size)
    context = tf.distribute.get_replica_context()
    gradient = context.all_reduce(tf.distribute.ReduceOp.SUM, tape.gradient(loss, weights))
    weights.assign_sub(args.learning_rate * gradient)
    return tf.reduce_sum(squares)


@tf.function
def epoch() -> tf.Tensor:
    """All batches of all ranks; the mean of the squared errors."""
    total = tf.constant(0.0)
    for batch in distributed:
        squares = strategy.run(replica_step, args=batch)
        total += strategy.reduce(tf.distribute.ReduceOp.SUM, squares, axis=None)
    return total / len(points)


for i in range(args.epochs):
    error = float(epoch())
    if mpistrat.rank() == 0:
        print(f"epoch {i + 1}/{args.epochs}, mean squared error {error:.2e}")
if mpistrat.rank() == 0:
    print(f"weights {np.round(weights.numpy(), 3).tolist()}, {mpistrat.size()} ranks")
