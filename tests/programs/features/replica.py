"""Features of run, reduce, gather and of what a replica may call, in tf.function unless the title says otherwise."""

from typing import Any

import numpy as np
import tensorflow as tf

from .common import World, assert_close, feature, in_replica, local_values, per_replica

GROUP = "Strategy and replica"


def _total(replicas: int) -> float:
    """The sum of the replicas' numbers, counted from 1."""
    return replicas * (replicas + 1) / 2


def _run(world: World, step: Any, *args: Any) -> list[np.ndarray]:
    return local_values(world, tf.function(lambda *a: world.strategy.run(step, args=a))(*args))


@feature(GROUP, "`reduce`: SUM and MEAN")
def reduce_sum_and_mean(world: World) -> None:
    values = per_replica(world, lambda i: float(i + 1))
    total, mean = tf.function(lambda v: (world.strategy.reduce("SUM", v, axis=None),
                                         world.strategy.reduce("MEAN", v, axis=None)))(values)
    assert (float(total), float(mean)) == (_total(world.replicas), (world.replicas + 1) / 2)


@feature(GROUP, "`reduce` over an axis, different numbers of rows")
def reduce_over_axis(world: World) -> None:
    values = per_replica(world, lambda i: np.full([i + 1, 2], i, np.float32))
    mean = world.strategy.reduce("MEAN", values, axis=0)
    rows = _total(world.replicas)
    assert_close([mean], [[sum(i * (i + 1) for i in range(world.replicas)) / rows] * 2])


@feature(GROUP, "`reduce` of a nested structure")
def reduce_nested(world: World) -> None:
    values = world.strategy.run(lambda: {"a": tf.constant(1.0), "b": [tf.constant([2.0])]})
    result = world.strategy.reduce("SUM", values, axis=None)
    assert (float(result["a"]), float(result["b"][0][0])) == (world.replicas, 2.0 * world.replicas)


@feature(GROUP, "`gather`, different numbers of rows")
def gather(world: World) -> None:
    joined = world.strategy.gather(per_replica(world, lambda i: np.full([i + 1, 2], i)), axis=0)
    np.testing.assert_array_equal(joined, np.concatenate([np.full([i + 1, 2], i) for i in range(world.replicas)]))


@feature(GROUP, "`all_reduce` of a nested structure")
def all_reduce_nested(world: World) -> None:
    def step(number: tf.Tensor) -> Any:
        result = in_replica().all_reduce("SUM", {"a": number, "b": (tf.ones([2]),)})
        return tf.concat([[result["a"]], result["b"][0]], 0)
    for result in _run(world, step, per_replica(world, lambda i: i + 1.0)):
        assert result.tolist() == [_total(world.replicas), world.replicas, world.replicas]


@feature(GROUP, "`all_reduce`, not in `tf.function`")
def all_reduce_eagerly(world: World) -> None:
    result = world.strategy.run(lambda: in_replica().all_reduce("MEAN", tf.constant(3.0)))
    assert [float(v) for v in local_values(world, result)] == [3.0] * len(local_values(world, result))


@feature(GROUP, "`all_reduce` of `tf.IndexedSlices`, different rows")
def all_reduce_slices(world: World) -> None:
    def step(number: tf.Tensor) -> tf.Tensor:
        slices = tf.IndexedSlices(tf.fill([number, 2], 1.0), tf.range(number), tf.constant([world.replicas + 1, 2]))
        return tf.convert_to_tensor(in_replica().all_reduce("SUM", slices))
    for result in _run(world, step, per_replica(world, lambda i: i + 1)):
        assert result[:, 0].tolist() == [world.replicas - i for i in range(world.replicas)] + [0]


@feature(GROUP, "Gradient through `all_reduce`")
def gradient_through_all_reduce(world: World) -> None:
    def step(number: tf.Tensor) -> tf.Tensor:
        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = in_replica().all_reduce("SUM", x * x) * number
        return tape.gradient(y, x)
    for result in _run(world, step, per_replica(world, lambda i: i + 1.0)):
        assert float(result) == 4.0 * _total(world.replicas)


@feature(GROUP, "`all_gather` and its gradient")
def all_gather_and_gradient(world: World) -> None:
    def step(number: tf.Tensor) -> tf.Tensor:
        x = tf.fill([2], number)
        with tf.GradientTape() as tape:
            tape.watch(x)
            joined = in_replica().all_gather(x, axis=0)
            y = tf.reduce_sum(joined * joined)
        return tf.concat([joined, tape.gradient(y, x) / number], 0)
    for result in _run(world, step, per_replica(world, lambda i: i + 1.0)):
        joined = np.repeat(np.arange(1.0, world.replicas + 1), 2)
        assert_close([result], [[*joined, 2.0 * world.replicas, 2.0 * world.replicas]])


@feature(GROUP, "`merge_call` and `extended.update`")
def merge_call(world: World) -> None:
    with world.strategy.scope():
        variable = tf.Variable(1.0)

    def merged(strategy: Any, value: Any) -> Any:
        total = strategy.extended.reduce_to("SUM", value, destinations=variable)
        strategy.extended.update(variable, lambda v, t: v.assign(t), args=(total,))
        return total
    _run(world, lambda number: in_replica().merge_call(merged, args=(number,)), per_replica(world, lambda i: i + 1.0))
    assert variable.numpy() == _total(world.replicas)


@feature(GROUP, "`all_reduce` in `tf.cond`")
def all_reduce_in_cond(world: World) -> None:
    def step(number: tf.Tensor, flag: tf.Tensor) -> tf.Tensor:
        return tf.cond(flag, lambda: in_replica().all_reduce("SUM", number), lambda: number)
    for result in _run(world, step, per_replica(world, lambda i: i + 1.0), tf.constant(True)):
        assert float(result) == _total(world.replicas)


@feature(GROUP, "`all_reduce` in `tf.while_loop`")
def all_reduce_in_loop(world: World) -> None:
    def step() -> tf.Tensor:
        return tf.while_loop(lambda i, total: i < 4, lambda i, total: (
            i + 1, total + in_replica().all_reduce("SUM", tf.cast(i, tf.float32))), (0, 0.0))[1]
    for result in _run(world, step):
        assert float(result) == 6.0 * world.replicas


@feature(GROUP, "`all_reduce` in a nested `tf.function`")
def all_reduce_in_nested_function(world: World) -> None:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return in_replica().all_reduce("SUM", x)
    for result in _run(world, lambda: inner(tf.constant(1.0)) + 10 * inner(tf.constant(2.0))):
        assert float(result) == 21.0 * world.replicas


@feature(GROUP, "`run` of a `tf.function`")
def run_of_a_function(world: World) -> None:
    step = tf.function(lambda x: in_replica().all_reduce("SUM", x))
    for result in local_values(world, world.strategy.run(step, args=(tf.constant(1.0),))):
        assert float(result) == world.replicas


@feature(GROUP, "Values for each replica")
def values_for_each_replica(world: World) -> None:
    own = [int(v) for v in local_values(world, per_replica(world, lambda i: 10 * i))]
    result = tf.function(lambda v: world.strategy.run(
        lambda x: x + in_replica().replica_id_in_sync_group, args=(v,)))(per_replica(world, lambda i: 10 * i))
    assert [int(v) for v in local_values(world, result)] == [v + v // 10 for v in own]
