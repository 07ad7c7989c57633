"""Graphs with collectives, and with gradients of these, are freed with the functions they were traced for."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import MPIStrategy
from mpistrat.tensorflow.bridge import python_op
from mpistrat.tensorflow.bridge.completion import COMPLETIONS

from ..support.levels import sample
from .strategy_helpers import SUM


def reduced(x: Any) -> Any:
    return hvd.allreduce(x, op=hvd.Sum)


def group(x: Any) -> Any:
    return hvd.grouped_allreduce([x, 2.0 * x, tf.cast(x, tf.float64)])[0]


def in_a_branch(x: Any) -> Any:
    return tf.cond(x[0] > 0.0, lambda: reduced(x), lambda: x)


def in_a_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, reduced(y)), [0, x])[1]


def in_a_function(x: Any) -> Any:
    return tf.function(in_a_branch, autograph=False)(x)


def with_a_tape(x: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = in_a_branch(x * x)
    return hvd.DistributedGradientTape(tape).gradient(y, x)


def left(references: list[Any]) -> int:
    gc.collect()
    return sum(reference() is not None for reference in references)


def callbacks() -> int:
    gc.collect()
    return sum(map(len, python_op._called.values()))


@sample("differentiated", [True, False])
@pytest.mark.parametrize("body", [reduced, group, hvd.allgather, lambda x: hvd.broadcast(x, 0), in_a_branch, in_a_loop,
                                  in_a_function, with_a_tape])
def test_nothing_is_left_of_functions(body: Callable, differentiated: bool) -> None:
    graphs, before, x = [], callbacks(), tf.ones([3])
    for _ in range(3):
        function = tf.function(body, autograph=False)
        with tf.GradientTape() as tape:
            if differentiated:
                tape.watch(x)
            y = function(x)
        if differentiated:
            assert tape.gradient(y, x) is not None
        graphs.append(weakref.ref(function.get_concrete_function(x).graph))
    del function, tape, y
    assert left(graphs) == 0
    assert callbacks() == before


def test_nothing_is_left_of_what_a_replica_ran() -> None:
    strategy, graphs, before = MPIStrategy(), [], callbacks()

    def replica(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = context.all_reduce(SUM, x * x) + tf.reduce_sum(context.all_gather(x, 0))
        return tape.gradient(y, x)

    for _ in range(3):
        function = tf.function(lambda: strategy.run(replica, args=(tf.ones([3]),)), autograph=False)
        function()
        graphs.append(weakref.ref(function.get_concrete_function().graph))
    del function
    assert left(graphs) == 0
    assert callbacks() == before


def test_nothing_is_left_of_models_that_were_compiled_anew(rank: int) -> None:
    data = np.random.default_rng(rank).standard_normal((16, 4)).astype(np.float32)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    functions, before, queues = [], None, None
    for _ in range(4):
        model.compile(mpistrat.keras.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
        model.fit(data, np.ones((16, 1)), batch_size=8, verbose=0)
        functions.append(weakref.ref(model.train_function))
        if before is None:
            before, queues = callbacks(), len(COMPLETIONS._slots)
    assert left(functions[:-1]) == 0
    assert callbacks() == before > 0
    assert len(COMPLETIONS._slots) == queues
