"""Train on handwritten digits that the ranks prepare for each other, by TensorFlow's own tf.data service.

    mpirun -np 2 python examples/data_service_digits.py

Each rank is a worker, which shuffles, changes and batches images; rank 0 is the dispatcher too. Each batch goes to the
rank that asks first. The servers listen on all addresses of their hosts and ask for no key: whoever reaches their ports
can run a dataset there, and so read files as the user of the job. Use a network that is closed to others.
"""

import hashlib
import platform
import sys

import keras
import tensorflow as tf

import mpistrat.keras as hvd

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("The digits come with scikit-learn, which is not installed: pip install scikit-learn")

hvd.init()
service = tf.data.experimental.service
host = "localhost" if len(hvd.hosts()) == 1 else platform.node()
dispatcher = service.DispatchServer() if hvd.rank() == 0 else None
address = hvd.broadcast_object(dispatcher and dispatcher.target.replace("localhost", host))
worker = service.WorkerServer(service.WorkerConfig(address.removeprefix("grpc://"), f"{host}:%port%"))

x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1).astype("float32") / 16


def noisy(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return image + tf.random.normal(tf.shape(image), stddev=0.05), label


# All ranks describe the same pipeline, which the workers run once for all of them.
data = tf.data.Dataset.from_tensor_slices((x[:1437], y[:1437])).repeat().shuffle(1437)
data = data.map(noisy, num_parallel_calls=tf.data.AUTOTUNE).batch(32)
data = data.apply(service.distribute("distributed_epoch", address, job_name="digits")).prefetch(tf.data.AUTOTUNE)

keras.utils.set_random_seed(1 + hvd.rank())  # The ranks start with different weights; the callback makes them equal.
model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(16, 3, activation="relu"),
                          keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.Flatten(),
                          keras.layers.Dense(10)])
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(2e-3 * hvd.size()))
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(data, epochs=6, steps_per_epoch=44 // hvd.size(), verbose=2 if hvd.rank() == 0 else 0,
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
hvd.barrier()  # The servers end with their ranks, and others may still read.

digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
_, accuracy = model.evaluate(x[1437:], y[1437:], verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.3f}, weights {digest}, of {hvd.size()} ranks", flush=True)
assert set(hvd.allgather_object(digest)) == {digest}, "The ranks have ended with different weights."
