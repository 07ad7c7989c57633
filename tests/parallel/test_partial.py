"""Groups of gradients, and layers whose gradients each rank keeps."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd_keras
import mpistrat.tensorflow as hvd
from mpistrat.core.errors import InvalidRequestError
from mpistrat.core.handle import Entry

from ..support.levels import sample
from .helpers import eagerly


@pytest.mark.horovod("groups")
@pytest.mark.parametrize("way", [eagerly, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("groups", [None, 1, 2, 50, "lists"], ids=str)
def test_groups_change_no_result(way: Callable, groups: Any, rank: int, size: int) -> None:
    variables = [tf.Variable(tf.fill([i + 1], float(rank))) for i in range(5)]
    given = [[variables[4], variables[0]], [variables[2]]] if groups == "lists" else groups
    factor = np.random.default_rng(rank).normal(size=5).astype("float32")

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) * f for v, f in zip(variables, factor)])
        return hvd.DistributedGradientTape(tape, groups=given).gradient(loss, [*variables, tf.constant(1.0)])

    *gradients, none = way(step)()
    assert none is None
    factors = mpistrat.allgather_object(factor)
    for i, gradient in enumerate(gradients):
        total = factors[0][i]
        for other in factors[1:]:
            total = np.float32(total + other[i])
        np.testing.assert_allclose(gradient, np.full(i + 1, total / np.float32(size)), rtol=1e-6)


@pytest.mark.horovod("groups", "num-groups")
@pytest.mark.parametrize("arguments, counts", [({}, [5]), ({"groups": 2}, [3, 2]), ({"num_groups": 5}, [1] * 5),
                                               ({"groups": "lists"}, [2, 1, 2])], ids=str)
def test_each_group_is_one_collective(arguments: dict, counts: list[int], submitted: list[Entry], rank: int,
                                      size: int) -> None:
    variables = [keras.Variable(np.zeros(i + 1)) for i in range(5)]
    if arguments.get("groups") == "lists":
        arguments = {"groups": [[variables[4], variables[0]], [variables[2]]]}

    def reduced(name: str) -> list[int]:
        return [len(entry.request.tensors) for entry in submitted if entry.request.name.startswith(name)]

    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), **arguments)
    optimizer.apply([tf.fill(v.shape, rank + 1.0) for v in variables], variables)
    for variable in variables:
        np.testing.assert_allclose(variable.numpy(), np.full(variable.shape, -(size + 1) / 2))
    assert reduced("optimizer") == counts
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable.value) for variable in variables])
    hvd.DistributedGradientTape(tape, **arguments).gradient(loss, variables)
    assert reduced("tape") == counts


@pytest.mark.horovod("partial-optimizer", "optimizer-local", "local-gradients")
@pytest.mark.parametrize("way", [eagerly, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize("scale", [True, False])
def test_local_variables_and_backward_passes(way: Callable, scale: bool, rank: int, size: int) -> None:
    local, shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"), keras.Variable([[0.0]])
    local.build((None, 1))
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, local_layers=local, scale_local_gradients=scale)
    variables = [local.kernel, shared]
    optimizer.build(variables)
    step = way(lambda gradient: optimizer.apply([gradient, gradient], variables))
    for passed in range(2):
        step(tf.constant([[(1.0 + passed) * (rank + 1)]]))
    np.testing.assert_allclose(local.kernel.numpy(), [[-3.0 * (rank + 1) / (size if scale else 1)]], rtol=1e-6)
    np.testing.assert_allclose(shared.numpy(), [[-3.0 * (size + 1) / 2]], rtol=1e-6)


@pytest.mark.horovod("partial-optimizer")
def test_each_rank_trains_its_own_local_layer(rank: int, size: int) -> None:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    local = model.layers[1]
    model.compile(hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=local), "mse")
    rows = np.random.default_rng(rank).normal(size=(8, 2)).astype("float32")
    model.fit(rows, rows.sum(1), batch_size=4, epochs=1, verbose=0, callbacks=[
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local.weights)])
    shared, own = ([weight.tobytes() for weight in layer.get_weights()] for layer in model.layers)
    assert len(set(map(tuple, mpistrat.allgather_object(shared)))) == 1
    assert len(set(map(tuple, mpistrat.allgather_object(own)))) == size


@pytest.mark.horovod("partial-optimizer")
@pytest.mark.parametrize("averages", [True, False])
def test_each_rank_keeps_the_statistics_of_its_local_layer(averages: bool, rank: int, size: int) -> None:
    local, shared = (keras.layers.BatchNormalization(momentum=0.0) for _ in range(2))
    model = keras.Sequential([keras.Input((2,)), local, shared, keras.layers.Dense(1)])
    model.compile(hvd_keras.PartialDistributedOptimizer(keras.optimizers.SGD(0.0), local_layers=local,
                                                        average_statistics=averages), "mse")
    x = np.random.default_rng(rank).normal(rank, 1.0 + rank, size=(8, 2)).astype("float32")
    model.fit(x, x.sum(1), batch_size=8, epochs=1, verbose=0, callbacks=[
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)])
    np.testing.assert_allclose(local.moving_mean.numpy(), x.mean(0), rtol=1e-4)
    of_ranks = mpistrat.allgather_object([variable.numpy().tobytes() for variable in shared.non_trainable_variables])
    assert len(set(map(tuple, of_ranks))) == (1 if averages else size)


@pytest.mark.horovod("partial-optimizer")
@sample("is_scaled", [False, True], ids=["plain", "loss scale"])
def test_ranks_with_few_batches_keep_the_optimizers_state_of_their_local_layer(is_scaled: bool, rank: int,
                                                                               size: int) -> None:
    """Its shape differs among the ranks, so that a broadcast of it would be an error."""
    local = keras.layers.Dense(rank + 2, name="dense")
    model = keras.Sequential([keras.Input((2,)), local, keras.layers.Lambda(lambda x: x[:, :1]),
                              keras.layers.Dense(1, name="dense_1")])
    optimizer = keras.optimizers.Adam(0.1)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(hvd_keras.PartialDistributedOptimizer(optimizer, local_layers=local, uneven="join"), "mse")
    x = np.random.default_rng(rank).normal(size=(4 * (rank + 1), 2)).astype("float32")
    model.fit(x, x.sum(1), batch_size=4, epochs=2, verbose=0)
    slots = [v for v in model.optimizer.variables if v.path.endswith(("momentum", "velocity"))]
    own = [v for v in slots if v.shape in ([2, rank + 2], [rank + 2])]
    assert len(own) == 4 and len(slots) == 8
    of_ranks = mpistrat.allgather_object([v.numpy().tobytes() for v in slots if not any(v is o for o in own)])
    assert len(set(map(tuple, of_ranks))) == 1


@pytest.mark.horovod("partial-tape")
def test_a_tape_leaves_local_layers_alone(rank: int, size: int) -> None:
    layer, shared = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"), tf.Variable([[1.0]])
    layer.build((None, 1))
    with tf.GradientTape() as tape:
        loss = tf.matmul(shared, layer.kernel.value) * (rank + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape, op=hvd.Sum, local_layers=[layer], scale_local_gradients=False)
    of_layer, of_shared = tape.gradient(loss, [layer.kernel.value, shared])
    assert of_layer.numpy().tolist() == [[rank + 1.0]]
    assert of_shared.numpy().tolist() == [[size * (size + 1) / 2]]


@pytest.mark.horovod("partial-optimizer")
@pytest.mark.parametrize("wrong", [3, ["dense"], keras.layers.Dense(2)], ids=["number", "name", "not built"])
def test_what_is_no_layer_with_weights_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="local_layers"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=wrong)
