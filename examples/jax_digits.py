"""Train a small jax network on handwritten digits, averaging gradients by hand, on any number of ranks.

    python examples/jax_digits.py
    mpirun -np 2 python examples/jax_digits.py

mpistrat accepts jax arrays, on the CPU or on a GPU, and returns jax arrays.
"""

import argparse
import hashlib
import sys
import time

import numpy as np

import mpistrat

try:
    import jax
    import jax.numpy as jnp
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error.name} is not installed: pip install jax scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()

mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
devices = jax.local_devices()
jax.config.update("jax_default_device", devices[mpistrat.local_rank() % len(devices)])

x, y = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
images, labels = jnp.asarray(x[order] / 16, jnp.float32), jnp.asarray(y[order])
train = mpistrat.shard(np.arange(1437))  # This rank's images, as many as every other rank's.


def logits(weights, batch):
    """The output of a network of two layers; `weights` are (matrix, bias, matrix, bias)."""
    matrix1, bias1, matrix2, bias2 = weights
    return jnp.maximum(batch @ matrix1 + bias1, 0) @ matrix2 + bias2


@jax.value_and_grad
def loss_of(weights, batch, classes):
    """The mean cross-entropy."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits(weights, batch)), classes[:, None], axis=1).mean()


@jax.jit
def updated(weights, velocities, gradients):
    """One step of gradient descent with momentum."""
    velocities = [0.9 * velocity + gradient for velocity, gradient in zip(velocities, gradients)]
    return [weight - 0.1 * velocity for weight, velocity in zip(weights, velocities)], velocities


step = jax.jit(loss_of)
shapes = [(64, 64), (64,), (64, 10), (10,)]
keys = jax.random.split(jax.random.key(1 + rank), len(shapes))  # They differ; the broadcast makes the weights equal.
weights = [mpistrat.broadcast(jax.random.normal(key, shape) / 8, root_rank=0, name=f"weight.{i}")
           for i, (key, shape) in enumerate(zip(keys, shapes))]
velocities = [jnp.zeros_like(weight) for weight in weights]

began = time.monotonic()
shuffle = np.random.default_rng(rank)
for epoch in range(args.epochs):
    total = jnp.zeros(())
    shuffled = shuffle.permutation(train)
    for start in range(0, len(train), args.batch_size):
        batch = shuffled[start:start + args.batch_size]
        loss, gradients = step(weights, images[batch], labels[batch])
        # Averaging is a Python call, so it is between the two compiled functions.
        gradients = mpistrat.grouped_allreduce(gradients, name="gradients")
        weights, velocities = updated(weights, velocities, gradients)
        total += loss * len(batch) / len(train)
    mean = float(mpistrat.allreduce(total, name="loss"))
    if rank == 0:
        print(f"epoch {epoch + 1}/{args.epochs}: loss {mean:.4f}", flush=True)
seconds = time.monotonic() - began

digests = mpistrat.allgather_object(hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in weights)).hexdigest())
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if rank == 0:
    accuracy = float((logits(weights, images[1437:]).argmax(axis=1) == labels[1437:]).mean())
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digests[0]}, the same on all ranks ({size})")
