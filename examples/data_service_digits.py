"""Train on handwritten digits that workers of tf.data service prepare for all ranks.

    mpirun -np 2 python -m mpistrat.tensorflow.data.compute_worker service.json &
    mpirun -np 2 python examples/data_service_digits.py service.json

The ranks of the first job are the workers, which shuffle, change and batch images, also on other hosts. Each batch goes
to the rank of the second job that asks first. The workers end with the training.
"""

import argparse
import hashlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.tensorflow import barrier
from mpistrat.tensorflow.data.compute_service import TfDataServiceConfig

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("config", metavar="CONFIG", help="the file that the workers write")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
train, test = order[:1437], order[1437:]


def noisy(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return image + tf.random.normal(tf.shape(image), stddev=0.05), label


# All ranks describe the same pipeline, which the workers run once for all of them.
config = TfDataServiceConfig.read(args.config, wait_for_file_creation=True)
data = tf.data.Dataset.from_tensor_slices((x[train], y[train])).repeat().shuffle(len(train))
data = data.map(noisy, num_parallel_calls=tf.data.AUTOTUNE).batch(args.batch_size)
data = data.send_to_data_service(config, hvd.rank(), size=hvd.size(), reuse_dataset=True).prefetch(tf.data.AUTOTUNE)

keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the callback makes them equal.
model = keras.Sequential([
    keras.Input((8, 8, 1)),
    keras.layers.Conv2D(16, 3, activation="relu"),
    keras.layers.Conv2D(32, 3, activation="relu"),
    keras.layers.MaxPooling2D(),
    keras.layers.Flatten(),
    keras.layers.Dense(10),
])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3 * hvd.size()))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
began = time.monotonic()
model.fit(data, epochs=args.epochs, steps_per_epoch=len(train) // (args.batch_size * hvd.size()),
          verbose=2 if chief else 0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
seconds = time.monotonic() - began
barrier()  # Other ranks may still read.
if chief:
    config.compute_client().shutdown()

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest)
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if chief:
    _, accuracy = model.evaluate(x[test], y[test], verbose=0)
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digest}, the same on all ranks ({hvd.size()})")
