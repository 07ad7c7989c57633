"""Train a CNN on handwritten digits as long jobs do: changed images, a falling learning rate, and going on from a file.

    python examples/keras_digits_advanced.py --directory run
    mpirun -np 2 python examples/keras_digits_advanced.py --directory run --epochs 10
    mpirun -np 2 python examples/keras_digits_advanced.py --directory run --epochs 20   # goes on after epoch 10

Only the first rank reads and writes the directory, so that it may be on a disk of its host.
"""

import argparse
import glob
import hashlib
import os
import re
import sys
import time

import keras
import numpy as np

import mpistrat.keras as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--directory", required=True, help="where the model is saved after each epoch")
parser.add_argument("--epochs", type=int, default=20, help="of all jobs together (default: 20)")
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one rank (default: 0.001)")
parser.add_argument("--warmup-epochs", type=int, default=3)
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
train, test = hvd.shard(order[:1437]), hvd.shard(order[1437:])  # The same number of rows on each rank.
keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the callback makes them equal.


def new_model() -> keras.Model:
    model = keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),  # In training only; other shifts on each rank.
        keras.layers.RandomRotation(0.03, fill_mode="constant"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.25),
        keras.layers.Dense(10),
    ])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(args.learning_rate * hvd.size()))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


# The chief finds the last file. All ranks need the number of its epoch, so that they run as many epochs; its weights
# and the state of the optimizer come to them with the broadcast when training begins.
files = sorted(glob.glob(os.path.join(args.directory, "epoch-*.keras"))) if chief else []
done = hvd.broadcast_object(int(re.findall(r"\d+", files[-1])[-1]) if files else 0, root_rank=0)
model = hvd.load_model(files[-1]) if files else new_model()

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),  # Before those that read metrics.
    hvd.callbacks.LearningRateWarmupCallback(args.learning_rate * hvd.size(), warmup_epochs=args.warmup_epochs),
    keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=3, min_lr=1e-5),
]
if chief:
    os.makedirs(args.directory, exist_ok=True)
    callbacks.append(keras.callbacks.ModelCheckpoint(os.path.join(args.directory, "epoch-{epoch:04d}.keras")))

began = time.monotonic()
model.fit(x[train], y[train], batch_size=args.batch_size, initial_epoch=done, epochs=args.epochs,
          validation_data=(x[test], y[test]), callbacks=callbacks, verbose=2 if chief else 0)
seconds = time.monotonic() - began

# Each rank tests on its part of the images, all parts of one length, so that the mean is that of all images.
accuracy = float(hvd.allreduce(model.evaluate(x[test], y[test], verbose=0)[1], name="accuracy"))
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest)
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if chief:
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digest}, the same on all ranks ({hvd.size()})")
