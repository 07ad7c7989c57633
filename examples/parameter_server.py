"""Train a small network on handwritten digits asynchronously, with TensorFlow's own ParameterServerStrategy.

    mpirun -np 4 python examples/parameter_server.py
    mpirun --with-ft ulfm -np 4 python examples/parameter_server.py   # continues when a worker is killed

Rank 0 is the coordinator, the last rank holds the variables, the others compute gradients, each at its own pace.
"""

import argparse
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import mpistrat.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

hvd.init()
if hvd.size() < 3:
    sys.exit(f"a coordinator, a worker and a parameter server are 3 ranks; there are {hvd.size()} (mpirun -np 3)")
strategy = hvd.strategy("parameter_server")  # Returns on rank 0 only; the others serve it and end here.


def load_data() -> tuple[np.ndarray, ...]:
    """Images of shape (n, 64) from 0 to 1 and their labels, for training and for testing."""
    x, y = load_digits(return_X_y=True)
    x = x.astype("float32") / 16
    train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])
    return x[train], y[train], x[test], y[test]


x_train, y_train, x_test, y_test = load_data()
steps = len(x_train) // args.batch_size
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
keras.utils.set_random_seed(1)  # Asynchronous training ends with other weights in each run all the same.
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    optimizer = keras.optimizers.Adam(2e-3)
    optimizer.build(model.trainable_variables)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_dataset() -> tf.data.Dataset:
    """The input of one worker, in an order of its own."""
    data = tf.data.Dataset.from_tensor_slices((x_train, y_train))
    return data.shuffle(len(x_train)).repeat().batch(args.batch_size)


def compute(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


@tf.function
def train_step(iterator: tf.data.Iterator) -> tf.Tensor:
    return strategy.run(compute, args=next(iterator))


began = time.monotonic()
iterator = iter(coordinator.create_per_worker_dataset(make_dataset))
for epoch in range(args.epochs):
    losses = [coordinator.schedule(train_step, (iterator,)) for _ in range(steps)]  # Any free worker executes it.
    coordinator.join()
    print(f"epoch {epoch + 1}/{args.epochs}: loss {np.mean(coordinator.fetch(losses)):.4f}", flush=True)
seconds = time.monotonic() - began

accuracy = np.mean(model(x_test).numpy().argmax(axis=1) == y_test)
print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, {hvd.size() - 2} workers")
