"""Train a small network on handwritten digits, while the last rank evaluates every checkpoint until training ends.

    mpirun -np 3 python examples/evaluator.py

All other ranks train together. Every host sees the directory of the checkpoints, as on a cluster's shared file system.
"""

import argparse
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import mpistrat.tensorflow as hvd
from mpistrat.keras import DistributedOptimizer
from mpistrat.keras.callbacks import BroadcastGlobalVariablesCallback

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--directory", default=".", help="where to make the directory of this run (default: here)")
args = parser.parse_args()

hvd.init()
trainers = list(range(hvd.size() - 1))
if not trainers:
    sys.exit("a chief and an evaluator are 2 ranks; there is one (mpirun -np 2)")
resolver = hvd.MPIClusterResolver({"chief": 1, "worker": len(trainers) - 1, "evaluator": 1})
chief = resolver.task_type == "chief"
directory = hvd.broadcast_object(tempfile.mkdtemp(prefix="digits-", dir=args.directory) if chief else None)

x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
train, test = np.split(np.random.default_rng(0).permutation(len(x)), [1437])  # The same split on every rank.
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
checkpoint = tf.train.Checkpoint(model=model)


def accuracy() -> float:
    return float(np.mean(model(x[test]).numpy().argmax(axis=1) == y[test]))


def follow_checkpoints() -> None:
    """Evaluate the newest checkpoint, again and again, until training has ended."""
    evaluated, ended = None, False
    while not ended:
        ended = resolver.wait_for_chief(timeout_s=0.2)  # Before the search, to not miss the last one.
        newest = tf.train.latest_checkpoint(directory)
        if newest not in (None, evaluated):
            checkpoint.restore(newest).expect_partial()
            print(f"evaluator: checkpoint {newest.rsplit('-')[-1]}, test accuracy {accuracy():.3f}", flush=True)
            evaluated = newest


# A collective needs all ranks of init(). The evaluator is not among the ranks that train.
hvd.shutdown()
if resolver.task_type == "evaluator":
    follow_checkpoints()
    sys.exit()
hvd.init(comm=trainers)

rows = hvd.shard(train)
manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=None)
callbacks = [BroadcastGlobalVariablesCallback(0)]
if chief:
    callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: manager.save()))
model.compile(DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x[rows], y[rows], epochs=args.epochs, callbacks=callbacks, verbose=2 if chief else 0)
if chief:
    print(f"chief: trained on {hvd.size()} ranks, test accuracy {accuracy():.3f}")
