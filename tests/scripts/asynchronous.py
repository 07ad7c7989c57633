"""Train while TensorFlow executes eager operations and functions in the background.

usage: asynchronous.py    rank R prints "rank R: trained" after all results were checked
"""

import keras
import numpy as np
import tensorflow as tf
from reporting import say

import mpistrat.keras
import mpistrat.tensorflow as hvd

STEPS = 6

tf.config.experimental.set_synchronous_execution(False)
hvd.init()
rank, size = hvd.rank(), hvd.size()


@tf.function(autograph=False)
def step(x: tf.Tensor) -> list[tf.Tensor]:
    """More collectives than wait in their submits."""
    return [hvd.allreduce(x * i, op=hvd.Sum, name=f"of_a_step_{i}") for i in range(20)]


@tf.function(autograph=False)
def gradient(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cond(x[0] > 0.0, lambda: hvd.allreduce(x * x, op=hvd.Sum), lambda: x)
    return tape.gradient(y, x)


# While these go on in the background, the program has eager collectives too.
results, ones = [], tf.ones([3])
for number in range(STEPS):
    results.append((step(ones * float(number)), gradient(ones), hvd.allreduce(tf.constant(float(number)), op=hvd.Sum)))
for number, (sums, slope, eager) in enumerate(results):
    for i, total in enumerate(sums):
        np.testing.assert_array_equal(total.numpy(), [float(size * number * i)] * 3)
    np.testing.assert_array_equal(slope.numpy(), [2.0 * size] * 3)
    assert eager.numpy() == size * number

keras.utils.set_random_seed(rank)
model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(8, activation="tanh") for _ in range(3))])
model.compile(mpistrat.keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
data = np.random.default_rng(rank).standard_normal((48, 4)).astype(np.float32)
model.fit(data, np.ones((48, 8), np.float32), batch_size=8, epochs=2, verbose=0,
          callbacks=[mpistrat.keras.callbacks.BroadcastGlobalVariablesCallback(0)])
for weights in model.get_weights():
    everybody = hvd.allgather(weights[np.newaxis])
    np.testing.assert_array_equal(everybody, np.stack([weights] * size))
say("trained")
