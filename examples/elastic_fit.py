"""Training with fit that goes on when ranks or hosts are lost.

    mpistrat run --elastic -np 4 python examples/elastic_fit.py
    mpistrat run --elastic -np 4 -H node1:2,node2:2 python examples/elastic_fit.py

While it runs, end a rank: `kill -9` with one of the process numbers that it prints. The other ranks go on in the same
epoch, with the weights of the last commit.
"""

import argparse
import os
import sys

import keras

import mpistrat
import mpistrat.keras as hvd
from mpistrat.tensorflow import MPIStrategy

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES")
args = parser.parse_args()

keras.utils.set_random_seed(1)
strategy = MPIStrategy()
print(f"rank {mpistrat.rank()} of {mpistrat.size()} is process {os.getpid()}", flush=True)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
train, test = slice(1437), slice(1437, None)

with strategy.scope():
    model = keras.Sequential([
        keras.Input(x.shape[1:]),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

model.fit(x[train], y[train], batch_size=64, epochs=args.epochs, verbose=2 if mpistrat.rank() == 0 else 0,
          callbacks=[hvd.callbacks.Elastic(commit_every=args.commit_every)])
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
if mpistrat.rank() == 0:
    print(f"test accuracy {accuracy:.3f}, {mpistrat.size()} ranks at the end")
