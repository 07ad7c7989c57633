"""As shuffled_order.py, but at every fifth step a shape differs; the error is caught, and the script goes on.

usage: mismatch_caught.py STEPS TENSORS
"""

import random
import sys

import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(1)

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use

steps, tensors = int(sys.argv[1]), int(sys.argv[2])
hvd.init()
rank, size = hvd.rank(), hvd.size()
order = list(range(tensors))
random.Random(rank).shuffle(order)
caught = 0


@tf.function(input_signature=[tf.TensorSpec([]), tf.TensorSpec([None])], autograph=False)
def step(value: tf.Tensor, odd: tf.Tensor) -> list[tf.Tensor]:
    sums: list[tf.Tensor | None] = [None] * tensors
    for i in order:
        sums[i] = hvd.allreduce(odd if i == 7 else tf.fill([5], value + i), op=hvd.Sum, name=f"tensor_{i}")
    return sums


for number in range(steps):
    is_odd = number % 5 == 4
    try:
        for i, total in enumerate(step(tf.constant(float(number)), tf.ones([2 + rank if is_odd else 2]))):
            assert set(total.numpy()) == {size if i == 7 else size * (number + i)}, f"step {number}, {i}: {total}"
        assert not is_odd, f"step {number} did not fail"
    except tf.errors.OpError as error:
        assert "tensor_7: the ranks disagree on shape: (2,) on ranks [0]; (3,) on ranks [1]" in str(error), error
        caught += 1
        hvd.shutdown()
        hvd.init()
print(f"rank {rank}: {steps} steps, {caught} errors")
