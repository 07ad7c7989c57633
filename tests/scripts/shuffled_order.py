"""Every rank builds its collectives in an order of its own, with one inter-op thread; the sums must be right.

usage: shuffled_order.py STEPS TENSORS [gpu|caught]

With "gpu" the tensors go the way of GPU tensors, on a stand-in. With "caught" a shape differs at every fifth step; the
error is caught, and the script begins anew.
"""

import random
import sys

import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use

steps, tensors = int(sys.argv[1]), int(sys.argv[2])
hvd.init()
rank, size = hvd.rank(), hvd.size()
if "gpu" in sys.argv:
    from tests.support import tensorflow_stand_in
    tensorflow_stand_in.install(rank)
order = list(range(tensors))
random.Random(rank).shuffle(order)
orders = hvd.allgather_object(order)
assert len({tuple(other) for other in orders}) == size, "the ranks must differ for this to test anything"
odd = len(order) // 2 if "caught" in sys.argv else -1
caught = 0


@tf.function(input_signature=[tf.TensorSpec([]), tf.TensorSpec([None])])
def step(value: tf.Tensor, more: tf.Tensor) -> tf.Tensor:
    sums: list[tf.Tensor | None] = [None] * tensors
    for i in order:
        mine = tf.fill([10 + i], value * tf.cast(rank + 1, tf.float32) + tf.cast(i, tf.float32))
        sums[i] = hvd.allreduce(tf.concat([mine, more], 0) if i == odd else mine, op=hvd.Sum, name=f"tensor/{i}")
    return tf.stack([tf.reduce_max(tf.abs(s - (value * size * (size + 1) / 2 + size * i))) for i, s in enumerate(sums)])


for number in range(steps):
    differs = odd >= 0 and number % 5 == 4
    try:
        errors = step(tf.constant(float(number)), tf.ones([rank if differs else 0]))
        assert not errors.numpy().any() and not differs, f"step {number}: wrong on rank {rank}: {errors.numpy()}"
    except tf.errors.OpError as error:
        assert differs and f"tensor_{odd}: the ranks disagree on shape: " in str(error), error
        caught += 1
        hvd.shutdown()
        hvd.init()
print(f"rank {rank}: {steps} steps of {tensors} tensors are right, {caught} errors")
