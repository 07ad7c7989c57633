"""Train two models at the same time, each data-parallel on half of the ranks, and let both predict together.

    mpirun -np 2 python examples/process_sets.py
    mpirun -np 4 python examples/process_sets.py

The first half of the ranks is a process set that trains a network of convolutions, the second half one that trains a
dense network. Gradients, initial weights and metrics stay within a set. At the end all ranks add their predictions.
"""

import argparse
import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()

hvd.init()
if hvd.size() < 2:
    sys.exit("Two models need two ranks or more: mpirun -np 2 python examples/process_sets.py")
half = hvd.size() // 2
sets = [hvd.add_process_set(range(half)), hvd.add_process_set(range(half, hvd.size()))]  # On every rank.
number = 0 if hvd.rank() < half else 1
own = sets[number]

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
train, test = order[:1437], order[1437:]
train = hvd.shard(train, process_set=own)  # This rank's rows; the ranks of its set have the others.

keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the callback makes them equal.
hidden = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten()] \
    if number == 0 else [keras.layers.Flatten(), keras.layers.Dense(64, activation="relu")]
model = keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10, activation="softmax")])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3 * own.size()), process_set=own)
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
first = min(own.ranks)
model.fit(x[train], y[train], batch_size=args.batch_size, epochs=args.epochs, verbose=2 if hvd.rank() == 0 else 0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(first, process_set=own),
                     hvd.callbacks.MetricAverageCallback(process_set=own)])

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest, process_set=own)
if len(set(digests)) > 1:
    sys.exit(f"The ranks of a set have ended with different weights: {digests}")

# Over all ranks: the mean of both models, each of which predicts the same on all ranks of its set.
predicted = model.predict(x[test], verbose=0)
together = hvd.allreduce(tf.constant(predicted / (2 * own.size())), op=hvd.Sum, name="predictions").numpy()
accuracies = hvd.allgather_object(float(np.mean(predicted.argmax(axis=1) == y[test])))
if hvd.rank() == 0:
    print(f"test accuracy {accuracies[0]:.3f} and {accuracies[half]:.3f} of the models on {half} and "
          f"{hvd.size() - half} ranks, {np.mean(together.argmax(axis=1) == y[test]):.3f} together")
