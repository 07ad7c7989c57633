"""Train on handwritten digits with Adasum, which combines the gradients of the ranks without a larger learning rate.

    python examples/adasum_digits.py
    mpirun -np 2 python examples/adasum_digits.py
    mpirun -np 2 python examples/adasum_digits.py --op average

Adasum adds what the gradients of two ranks have orthogonal to each other, and averages what they have in common. So the
learning rate is that of one rank, whatever the number of ranks.
"""

import argparse
import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
parser.add_argument("--op", choices=["adasum", "average"], default="adasum", help="of the gradients (default: adasum)")
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
train, test = order[:1437], order[1437:]
x_train, y_train = hvd.shard(x[train], y[train])

keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the broadcast makes them equal.
data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train)).batch(args.batch_size)
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(10),
])
optimizer = keras.optimizers.SGD(0.1)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
op = hvd.Adasum if args.op == "adasum" else hvd.Average


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    gradients = hvd.DistributedGradientTape(tape, op=op).gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


hvd.broadcast_variables(model.weights, root_rank=0)
for epoch in range(args.epochs):
    loss = hvd.allreduce(tf.reduce_mean([train_step(images, labels) for images, labels in data]))
    if chief:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss.numpy():.4f}", flush=True)

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest)
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if chief:
    accuracy = np.mean(model.predict(x[test], verbose=0).argmax(axis=1) == y[test])
    print(f"test accuracy {accuracy:.3f} with {args.op}, weights {digest}, the same on all ranks ({hvd.size()})")
