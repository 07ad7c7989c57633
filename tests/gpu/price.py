"""Measures what averaging costs a step on a GPU: ResNet-50's training, and gradients of ResNet-50 and BERT-base alone.

    python -m tests.gpu.price
    mpistrat run -np 2 -- python -m tests.gpu.price

Rank 0 prints each figure as soon as it is known, with the aim for one rank. With --stand-in the program runs on the CPU
with a small model, and its figures mean nothing.
"""

import statistics
import sys
import time
from collections.abc import Callable

import keras
import tensorflow as tf

import mpistrat.keras as hvd
from mpistrat.cli.bench import Shapes, bert_base, resnet50
from mpistrat.tensorflow import DistributedGradientTape
from mpistrat.tensorflow.ops import grouped_allreduce

IS_STAND_IN = "--stand-in" in sys.argv
WARM_UP, STEPS = (1, 3) if IS_STAND_IN else (5, 25)


def milliseconds(step: Callable[[], tf.Tensor]) -> float:
    """Return the median time of a step. Collective if the step has a collective."""
    seconds = []
    for number in range(WARM_UP + STEPS):
        began = time.perf_counter()
        step().numpy()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


def gradients_alone(shapes: Shapes, averages: bool, is_compiled: bool) -> float:
    variables = [tf.Variable(tf.random.normal(shape)) for shape in shapes]

    @tf.function(jit_compile=is_compiled)
    def step() -> tf.Tensor:
        gradients = [variable * 0.5 for variable in variables]
        if averages:
            gradients = grouped_allreduce(gradients, name="alone")
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(gradient)
        return tf.reduce_sum(variables[-1])

    return milliseconds(step)


def training_step(averages: bool, is_compiled: bool) -> Callable[[], tf.Tensor]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)]) if IS_STAND_IN else \
        keras.applications.ResNet50(weights=None)
    rows, classes = (4, 4) if IS_STAND_IN else (16, 1000)
    x, y = tf.random.normal([rows, *model.input_shape[1:]]), tf.random.uniform([rows], 0, classes, tf.int64)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=IS_STAND_IN)
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=is_compiled)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        if averages:
            tape = DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        return value

    return step


def main() -> None:
    hvd.init()
    small: tuple[Shapes, Shapes] = ([(5, 3), (3,)], [(7,)])
    resnet, bert = small if IS_STAND_IN else (resnet50(), bert_base())
    for name, measure, aim in (
            ("a step of ResNet-50, 16 images", lambda *how: milliseconds(training_step(*how)), "1.5 ms more"),
            ("161 gradients of ResNet-50 alone", lambda *how: gradients_alone(resnet, *how), "1 ms more"),
            ("199 gradients of BERT-base alone", lambda *how: gradients_alone(bert, *how), "no aim")):
        for is_compiled in (True, False):
            with_averaging, without = measure(True, is_compiled), measure(False, is_compiled)
            if hvd.rank() == 0:
                print(f"{name}, {'compiled by XLA' if is_compiled else 'not compiled'}, {hvd.size()} ranks: "
                      f"{with_averaging:.2f} ms with averaging, {without:.2f} without (aim on one rank: {aim})",
                      flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
