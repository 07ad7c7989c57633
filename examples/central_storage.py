"""Train a network on scikit-learn's digits with Adam's moments on rank 0 only, as CentralStorageStrategy would.

    python examples/central_storage.py
    mpirun -np 2 python examples/central_storage.py

Rank 0 updates and broadcasts the weights; the others only compute gradients. The weights have the same bits with
    mpirun -np 2 python examples/central_storage.py --strategy mirrored
"""

import argparse
import hashlib
import sys

import keras
import numpy as np

import mpistrat
import mpistrat.tensorflow as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--strategy", default="central_storage", help="or mirrored (default: central_storage)")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks together in a step (default: 64)")
args = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = hvd.strategy(args.strategy)
x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
train, test = slice(1437), slice(1437, None)

with strategy.scope():
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

chief = hvd.rank() == 0
model.fit(x[train], y[train], batch_size=args.batch_size, epochs=args.epochs, verbose=2 if chief else 0)
_, accuracy = model.evaluate(x[test], y[test], verbose=0)

# What this rank has; the public `variables` are those of all ranks, such as the counter of steps.
slots = mpistrat.allgather_object(sum(variable.numpy().nbytes for variable in model.optimizer._variables))
weights = model.get_weights()
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in weights)).hexdigest()
if len(set(mpistrat.allgather_object(digest))) > 1:
    sys.exit("The ranks have ended with different weights.")
if chief:
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in weights))
    for rank, nbytes in enumerate(slots):
        print(f"rank {rank}: {nbytes} bytes for the optimizer")
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {hvd.size()} ranks")
    print(f"sha256 of the weights: {digest}")
