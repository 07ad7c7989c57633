"""Checks collectives in functions that XLA compiles, with CUDA graphs ("command buffers") wherever XLA can make them.

    python -m tests.gpu.compiled
    mpistrat run -np 2 -- python -m tests.gpu.compiled

A replay of a CUDA graph would not call the handler of a custom call. Therefore the checks count the handler's calls.
With --stand-in the program runs without a GPU, to show that the program itself works.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1"

import numpy as np
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.tensorflow import DistributedGradientTape
from mpistrat.tensorflow.graph import buckets
from mpistrat.tensorflow.ops import allreduce, grouped_allreduce
from mpistrat.tensorflow.xla import custom_call
from tests.gpu.tensorflow_checks import run, same

STEPS = 10
calls = 0
_execute = custom_call._execute


def counted(call: Any) -> Any:
    global calls
    calls += 1
    return _execute(call)


custom_call._execute = counted


def in_steps(step: Callable[[tf.Tensor], Any], each: int, expected: Callable[[int], Any]) -> None:
    """Run a compiled step ten times. Check each result, and that each step has `each` calls of the handler."""
    global calls
    for number in range(STEPS):
        calls = 0
        same(step(tf.fill([1000], float(number + mpistrat.rank()))), expected(number))
        assert calls == each, f"{calls} calls of the handler in step {number} instead of {each}"


def total(number: int) -> int:
    return sum(number + rank for rank in range(mpistrat.size()))


def each_step_calls_the_handler() -> None:
    """A step with one bucket has one call. With four buckets it has a call for each, and a call that waits for all."""
    @tf.function(jit_compile=True)
    def step(values: tf.Tensor) -> tf.Tensor:
        parts = grouped_allreduce([values * 2.0 + float(i) for i in range(4)], op=hvd.Sum, name="parts")
        return tf.add_n(parts)

    def expected(number: int) -> np.ndarray:
        return np.full(1000, 8 * total(number) + 6 * mpistrat.size())

    in_steps(step, 1, expected)
    before, buckets.GPU_BUCKET_BYTES = buckets.GPU_BUCKET_BYTES, 4000
    try:
        in_steps(tf.function(step.python_function, jit_compile=True), 5, expected)
    finally:
        buckets.GPU_BUCKET_BYTES = before


def loops_and_branches_call_it_in_each_iteration() -> None:
    """A while loop has a collective, and a branch in the loop has a second one."""
    @tf.function(jit_compile=True)
    def step(values: tf.Tensor) -> tf.Tensor:
        for i in tf.range(3):
            values = allreduce(values, op=hvd.Average, name="loop")
            if i > 0:
                values = allreduce(values + 1.0, op=hvd.Average, name="branch")
        return values

    in_steps(step, 5, lambda number: np.full(1000, total(number) / mpistrat.size() + 2))


def two_compiled_functions_run_in_one() -> None:
    """One function calls two compiled functions. Their collectives run in program order."""
    first = tf.function(lambda values: allreduce(values, op=hvd.Sum, name="first"), jit_compile=True)
    second = tf.function(lambda values: allreduce(values, op=hvd.Average, name="second"), jit_compile=True)
    in_steps(tf.function(lambda values: second(first(values)) + first(values)), 3,
             lambda number: np.full(1000, 2 * total(number)))


def a_tape_gives_the_same_gradients_compiled_and_not() -> None:
    """Gradients of four matrices, in several buckets, clipped by the global norm. All ranks have the same bits."""
    kernels = [tf.Variable(tf.random.stateless_normal([64, 64], [7, i])) for i in range(4)]

    def gradients(values: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            result = values
            for kernel in kernels:
                result = tf.tanh(result) @ kernel * 0.1
            loss = tf.reduce_sum(result * result)
        return tf.clip_by_global_norm(DistributedGradientTape(tape).gradient(loss, kernels), 1.0)[0]

    values = tf.random.stateless_normal([8, 64], [mpistrat.rank(), 1])
    before, buckets.GPU_BUCKET_BYTES = buckets.GPU_BUCKET_BYTES, 64 * 64 * 4
    try:
        plain, compiled = tf.function(gradients), tf.function(gradients, jit_compile=True)
        for _ in range(STEPS):
            for one, other in zip(plain(values), compiled(values), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        found = [each.numpy() for each in compiled(values)]
    finally:
        buckets.GPU_BUCKET_BYTES = before
    for other in mpistrat.allgather_object(found):
        for mine, theirs in zip(found, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def sync_batch_normalization_is_right_when_it_is_compiled() -> None:
    """The gradient with respect to the input is the same, within rounding, as without XLA."""
    layer = hvd.SyncBatchNormalization()
    layer.build([None, 5])
    values = tf.constant(np.random.RandomState(mpistrat.rank()).randn(8, 5), tf.float32)

    def gradient(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = tf.reduce_sum(tf.square(layer(values, training=True))[:, ::2])
        return tape.gradient(result, values)

    expected = tf.function(gradient)(values)
    compiled = tf.function(gradient, jit_compile=True)
    for _ in range(STEPS):
        np.testing.assert_allclose(compiled(values), expected, atol=1e-4)


if __name__ == "__main__":
    sys.exit(bool(run([each_step_calls_the_handler, loops_and_branches_call_it_in_each_iteration,
                       two_compiled_functions_run_in_one, a_tape_gives_the_same_gradients_compiled_and_not,
                       sync_batch_normalization_is_right_when_it_is_compiled])))
