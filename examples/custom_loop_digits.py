"""Train a small CNN on handwritten digits with a custom training loop, on any number of ranks.

    python examples/custom_loop_digits.py
    mpirun -np 2 python examples/custom_loop_digits.py --checkpoint digits.keras

The digits are scikit-learn's, 8 x 8 pixels, unless --data names a file in the layout of Keras' mnist.npz.
"""

import argparse
import hashlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
parser.add_argument("--data", metavar="NPZ", help="an .npz file with x_train, y_train, x_test and y_test")
parser.add_argument("--checkpoint", metavar="PATH", help="save the model here after each epoch, as .keras")
args = parser.parse_args()


def load_data() -> tuple[np.ndarray, ...]:
    """Images of shape (n, height, width, 1) from 0 to 1 and their labels, for training and for testing."""
    if args.data:
        try:
            with np.load(args.data) as file:
                x_train, y_train, x_test, y_test = (file[k] for k in ("x_train", "y_train", "x_test", "y_test"))
        except Exception as error:
            sys.exit(f"--data {args.data} cannot be read as an .npz file in the layout of Keras' mnist: {error}")
        return x_train[..., None] / np.float32(255), y_train, x_test[..., None] / np.float32(255), y_test
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")
    x, y = load_digits(return_X_y=True)
    x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
    order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
    train, test = order[:1437], order[1437:]
    return x[train], y[train], x[test], y[test]


hvd.init()
chief = hvd.rank() == 0

# Each rank trains on its own rows. All ranks have the same number of rows, and so of steps.
x_train, y_train, x_test, y_test = load_data()
if len(x_train) < hvd.size():
    sys.exit(f"{len(x_train)} training images are too few for {hvd.size()} ranks")
x_train, y_train = hvd.shard(x_train, y_train)

keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the broadcast makes them equal.
data = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(len(x_train)).batch(args.batch_size)
model = keras.Sequential([
    keras.Input(x_train.shape[1:]),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(64, activation="relu"),
    keras.layers.Dropout(0.3),
    keras.layers.Dense(10),
])
# Together the ranks see size() times as many images in a step, so the steps may be larger.
optimizer = keras.optimizers.Adam(1e-3 * hvd.size())
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
metrics = [keras.metrics.Mean(), keras.metrics.SparseCategoricalAccuracy()]


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = loss_function(labels, logits)
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)  # Averaged over the ranks.
    optimizer.apply(gradients, model.trainable_variables)
    metrics[0].update_state(loss)
    metrics[1].update_state(labels, logits)


began = time.monotonic()
for epoch in range(args.epochs):
    for step, (images, labels) in enumerate(data):
        train_step(images, labels)
        if epoch == step == 0:  # After the first step, so that the optimizer has its variables too.
            hvd.broadcast_variables(model.weights + optimizer.variables, root_rank=0)
    loss, accuracy = hvd.allreduce(tf.stack([metric.result() for metric in metrics])).numpy()
    for metric in metrics:
        metric.reset_state()
    if chief:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}", flush=True)
        if args.checkpoint:
            model.save(args.checkpoint)
seconds = time.monotonic() - began

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest)
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if chief:
    accuracy = np.mean(model.predict(x_test, verbose=0).argmax(axis=1) == y_test)
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digest}, the same on all ranks ({hvd.size()})")
