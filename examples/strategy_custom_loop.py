"""Train on scikit-learn's digits with a custom training loop under MPIStrategy, as in TensorFlow's guide.

    python examples/strategy_custom_loop.py
    mpirun -np 2 python examples/strategy_custom_loop.py
"""

import argparse
import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import mpistrat
from mpistrat.tensorflow import MPIStrategy

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks together in a step (default: 64)")
args = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = MPIStrategy()
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 64).astype("float32") / 16
# Global batches of one size, of which each rank reads its part.
batches = tf.data.Dataset.from_tensor_slices((x[:1437], y[:1437])).shuffle(1437, seed=1).batch(
    args.batch_size, drop_remainder=True)
distributed = strategy.experimental_distribute_dataset(batches)

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(3e-3)
    losses_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def replica_step(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """One step on this rank's rows; apply_gradients adds up the ranks' gradients."""
    with tf.GradientTape() as tape:
        losses = losses_of(labels, model(inputs, training=True))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=args.batch_size)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    return loss


@tf.function
def step(batch: tuple) -> tf.Tensor:
    """One step on a global batch; the loss is that of all ranks."""
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=batch), axis=None)


chief = mpistrat.rank() == 0
for epoch in range(args.epochs):
    loss = np.mean([float(step(batch)) for batch in distributed])
    if chief:
        print(f"epoch {epoch + 1}/{args.epochs}, loss {loss:.4f}")

weights = [variable.numpy() for variable in model.trainable_variables]
if len(set(mpistrat.allgather_object(hashlib.sha256(b"".join(w.tobytes() for w in weights)).hexdigest()))) > 1:
    sys.exit("The ranks have ended with different weights.")
if chief:
    accuracy = float(np.mean(np.argmax(model(x[1437:]), -1) == y[1437:]))
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in weights))
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {mpistrat.size()} ranks")
