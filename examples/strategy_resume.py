"""Multi-worker training of a CNN that continues where it was interrupted: run it again with the same --directory.

    mpirun -np 2 python examples/strategy_resume.py --directory run --interrupt-after 3
    mpirun -np 2 python examples/strategy_resume.py --directory run

After each epoch a backup is made of the weights, the optimizer and the number of the epoch, and a copy of the best
model so far. All ranks have the same callbacks; every host sees the directory, as on a cluster's shared file system.
"""

import argparse
import os
import sys

import keras
import numpy as np

import mpistrat
from mpistrat.tensorflow import MPIStrategy

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--directory", required=True, help="where the backup and the best model are kept")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="images of all ranks together in a step (default: 64)")
parser.add_argument("--interrupt-after", type=int, metavar="EPOCHS", help="end after so many epochs, as if killed")
args = parser.parse_args()


class Interruption(keras.callbacks.Callback):
    """Ends the program at the beginning of an epoch."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        if epoch == args.interrupt_after:
            sys.exit(f"interrupted after epoch {epoch}")


keras.utils.set_random_seed(1)
strategy = MPIStrategy()
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
train, test = slice(1437), slice(1437, None)

with strategy.scope():
    model = keras.Sequential([
        keras.Input(x.shape[1:]),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

best = os.path.join(args.directory, "best.keras")
callbacks = [
    keras.callbacks.BackupAndRestore(os.path.join(args.directory, "backup")),
    keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True),
    Interruption(),
]
chief = mpistrat.rank() == 0
model.fit(x[train], y[train], batch_size=args.batch_size, epochs=args.epochs, validation_data=(x[test], y[test]),
          callbacks=callbacks, verbose=2 if chief else 0)

with strategy.scope():
    model = keras.models.load_model(best)
_, accuracy = model.evaluate(x[test], y[test], verbose=0)
if chief:
    norm = np.sqrt(sum(float((weight ** 2).sum()) for weight in model.get_weights()))
    print(f"test accuracy {accuracy:.3f}, norm of the weights {norm:.3f}, {mpistrat.size()} ranks")
