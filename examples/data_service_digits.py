"""Train on handwritten digits that workers of tf.data service prepare for all ranks.

    python examples/data_service_digits.py
    mpirun -np 2 python examples/data_service_digits.py

The first rank starts the dispatcher, and the first rank of each host a worker, which shuffles, changes and batches
images. Each batch goes to the rank that asks first.
"""

import argparse
import hashlib
import platform
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.tensorflow import barrier

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install 'mpistrat[examples]'")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
args = parser.parse_args()

hvd.init()
chief = hvd.rank() == 0
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16
order = np.random.default_rng(0).permutation(len(x))  # The same split on every rank.
train, test = order[:1437], order[1437:]

service = tf.data.experimental.service
host = "localhost" if len(hvd.hosts()) == 1 else platform.node()  # Other hosts must be able to resolve the name.
dispatcher = service.DispatchServer() if chief else None
port = dispatcher.target.rpartition(":")[2] if chief else ""
address = hvd.broadcast_object(f"{host}:{port}", root_rank=0)
if hvd.local_rank() == 0:
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=address, worker_address=f"{host}:%port%"))


def noisy(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return image + tf.random.normal(tf.shape(image), stddev=0.05), label


# All ranks describe the same pipeline. The workers run it once for all ranks that give the same name of a job.
data = tf.data.Dataset.from_tensor_slices((x[train], y[train])).repeat().shuffle(len(train))
data = data.map(noisy, num_parallel_calls=tf.data.AUTOTUNE).batch(args.batch_size)
data = data.apply(service.distribute(service.ShardingPolicy.DYNAMIC, f"grpc://{address}", job_name="training"))
data = data.prefetch(tf.data.AUTOTUNE)

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
barrier()  # The servers end with this script, and other ranks may still read.

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
digests = hvd.allgather_object(digest)
if len(set(digests)) > 1:
    sys.exit(f"The ranks have ended with different weights: {digests}")
if chief:
    _, accuracy = model.evaluate(x[test], y[test], verbose=0)
    print(f"test accuracy {accuracy:.3f}, {seconds:.1f} s, weights {digest}, the same on all ranks ({hvd.size()})")
