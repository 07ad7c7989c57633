"""Trains tables whose rows repeat in the gradients, with many optimizers and in three ways, as one process does.

usage: repeated_rows.py STEPS

Each way is one function that trains a table with each optimizer. The ranks must come to the same bits. Several threads
are needed to see a sum that has no order: TF_NUM_INTRAOP_THREADS=4 MPISTRAT_BIND=gpu.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

# TensorFlow adds less than 1024 rows in one thread.
TABLE, ROWS = (300, 64), 2048
STEPS = int(sys.argv[1])


def optimizers() -> dict[str, Any]:
    """Those that scatter rows, and those that make slices dense."""
    from keras.optimizers import SGD, Adadelta, Adagrad, Adam, Ftrl, Lamb, LossScaleOptimizer, RMSprop
    return {"sgd": SGD(0.1), "momentum": SGD(0.1, momentum=0.9), "adam": Adam(0.01), "adagrad": Adagrad(0.1),
            "adadelta": Adadelta(1.0), "ftrl": Ftrl(0.1), "rmsprop": RMSprop(0.01), "lamb": Lamb(0.01),
            "clipped": SGD(0.1, global_clipnorm=0.5), "accumulated": SGD(0.1, gradient_accumulation_steps=2),
            "averaged": SGD(0.1, use_ema=True, ema_overwrite_frequency=3), "scaled": LossScaleOptimizer(SGD(0.1))}


def built(each: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizers, and for each of them a variable of Keras."""
    import keras
    start = np.random.default_rng(1).normal(size=TABLE).astype("float32")
    of = {name: keras.Variable(start, name=name.replace(" ", "_")) for name in each}
    for name, optimizer in each.items():
        optimizer.build([of[name]])
    return each, of


def rows(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng([step, rank])
    return generator.integers(0, TABLE[0], ROWS), generator.normal(size=(ROWS, TABLE[1])).astype("float32")


def trained(train: Callable, of: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tables after all steps, of which each is given the gradient of this rank."""
    step = tf.function(train)
    for number in range(STEPS):
        step(*map(tf.constant, rows(number, hvd.rank())))
    return {name: table.numpy() for name, table in of.items()}


def slices(values: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, indices, tf.constant(TABLE, tf.int64))


def by_tape() -> dict[str, np.ndarray]:
    """Averaged by a tape, and applied by plain optimizers."""
    each, of = built(optimizers())

    def train(indices: tf.Tensor, values: tf.Tensor) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.add_n([tf.reduce_sum(tf.gather(table.value, indices) * values) for table in of.values()])
        gradients = tape.gradient(loss, [table.value for table in of.values()])
        for (name, optimizer), gradient in zip(each.items(), gradients, strict=True):
            optimizer.apply([scaled(optimizer, gradient)], [of[name]])
    return trained(train, of)


def scaled(optimizer: Any, gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient of a scaled loss, if the optimizer scales it back."""
    return slices(optimizer.scale_loss(gradient.values), gradient.indices)


def by_optimizer() -> dict[str, np.ndarray]:
    each, of = built({name: hvd.DistributedOptimizer(optimizer) for name, optimizer in optimizers().items()})

    def train(indices: tf.Tensor, values: tf.Tensor) -> None:
        for name, optimizer in each.items():
            optimizer.apply([scaled(optimizer, slices(values, indices))], [of[name]])
    return trained(train, of)


def by_strategy() -> dict[str, np.ndarray]:
    strategy = hvd.MPIStrategy()
    with strategy.scope():
        each, of = built(optimizers())

    def train(indices: tf.Tensor, values: tf.Tensor) -> None:
        def of_replica(indices: tf.Tensor, values: tf.Tensor) -> None:
            for name, optimizer in each.items():
                optimizer.apply([scaled(optimizer, slices(values / hvd.size(), indices))], [of[name]])
        strategy.run(of_replica, (indices, values))
    return trained(train, of)


def in_one_process() -> dict[str, np.ndarray]:
    each, of = built(optimizers())

    @tf.function
    def train(indices: tf.Tensor, values: tf.Tensor) -> None:
        for name, optimizer in each.items():
            optimizer.apply([scaled(optimizer, slices(values / hvd.size(), indices))], [of[name]])
    for step in range(STEPS):
        train(*map(np.concatenate, zip(*(rows(step, rank) for rank in range(hvd.size())), strict=True)))
    return {name: table.numpy() for name, table in of.items()}


hvd.init()
ways: dict[str, Callable] = {"tape": by_tape, "optimizer": by_optimizer, "strategy": by_strategy}
found = {way: train() for way, train in ways.items()}  # The tape is the first: nothing has changed Keras before.
expected = in_one_process()
for way, of in found.items():
    for name, table in of.items():
        everywhere = hvd.allgather_object(table.tobytes())
        assert len(set(everywhere)) == 1, f"{way}, {name}: the ranks have different bits"
        np.testing.assert_allclose(table, expected[name], rtol=1e-3, atol=1e-4, err_msg=f"{way}, {name}")
print(f"rank {hvd.rank()}: {len(found) * len(expected)} trainings of {STEPS} steps have the same bits", flush=True)
