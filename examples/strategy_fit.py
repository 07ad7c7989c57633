"""Train a small CNN on scikit-learn's digits with model.fit under MPIStrategy, on any number of ranks.

    python examples/strategy_fit.py
    mpirun -np 2 python examples/strategy_fit.py
    mpirun -np 2 python examples/strategy_fit.py --input dataset

The global batches are the same for any number of ranks, and so are the weights up to rounding.
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
parser.add_argument("--input", choices=["numpy", "dataset"], default="numpy",
                    help="what fit is given: arrays, or a tf.data.Dataset of global batches (default: numpy)")
args = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = MPIStrategy()
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
train, test = slice(1437), slice(1437, None)

with strategy.scope():
    model = keras.Sequential([
        keras.Input(x.shape[1:]),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

chief = mpistrat.rank() == 0
verbose = 2 if chief else 0
if args.input == "numpy":
    model.fit(x[train], y[train], batch_size=args.batch_size, epochs=args.epochs, verbose=verbose)
else:
    # Each rank reads its part of every global batch.
    batches = tf.data.Dataset.from_tensor_slices((x[train], y[train])).shuffle(1437, seed=1).batch(args.batch_size)
    model.fit(batches, epochs=args.epochs, verbose=verbose)

# evaluate is collective like fit: every rank calls it, and every rank gets the metrics of all rows.
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
weights = model.get_weights()
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
if len(set(mpistrat.allgather_object(digest))) > 1:
    sys.exit("The ranks have ended with different weights.")
if chief:
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in weights))
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {mpistrat.size()} ranks")
