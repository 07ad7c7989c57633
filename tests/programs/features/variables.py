"""Features of variables: how they begin, how they are written and read, and how they are saved."""

from typing import Any

import numpy as np
import tensorflow as tf

from .common import World, assert_equal_on_all, feature, per_replica

GROUP = "Variables"
ON_READ = tf.VariableSynchronization.ON_READ
Aggregation = tf.VariableAggregation


def _make(world: World, value: Any, **arguments: Any) -> Any:
    with world.strategy.scope():
        return tf.Variable(value, **arguments)


def _assigned(world: World, variable: Any) -> float:
    """The value of `variable` after replica i has assigned i + 1 to it."""
    values = per_replica(world, lambda i: i + 1.0)
    tf.function(lambda v: world.strategy.run(lambda x: variable.assign(x), args=(v,)))(values)
    return float(variable.numpy())


@feature(GROUP, "Random initial values are equal everywhere")
def initial_values_are_equal(world: World) -> None:
    tf.random.set_seed(world.rank)
    assert_equal_on_all([_make(world, tf.random.normal([4])).numpy()])


@feature(GROUP, "Made in `tf.function`")
def made_in_a_function(world: World) -> None:
    made: list[Any] = []

    @tf.function
    def program() -> None:
        def step() -> None:
            if not made:
                made.append(tf.Variable(tf.ones([2]), aggregation=Aggregation.SUM))
            made[0].assign_add(tf.ones([2]))
        world.strategy.run(step)
    program()
    np.testing.assert_array_equal(made[0].numpy(), [1.0 + world.replicas] * 2)


@feature(GROUP, "Assigned in a replica: SUM")
def assigned_sum(world: World) -> None:
    assert _assigned(world, _make(world, 0.0, aggregation=Aggregation.SUM)) == sum(range(world.replicas + 1))


@feature(GROUP, "Assigned in a replica: MEAN")
def assigned_mean(world: World) -> None:
    assert _assigned(world, _make(world, 0.0, aggregation=Aggregation.MEAN)) == (world.replicas + 1) / 2


@feature(GROUP, "Assigned in a replica: ONLY_FIRST_REPLICA")
def assigned_first(world: World) -> None:
    assert _assigned(world, _make(world, 0.0, aggregation=Aggregation.ONLY_FIRST_REPLICA)) == 1.0


@feature(GROUP, "Assigned in `tf.cond` in a replica")
def assigned_in_cond(world: World) -> None:
    variable = _make(world, 0.0, aggregation=Aggregation.SUM)

    @tf.function
    def program(flag: tf.Tensor) -> None:
        def step() -> None:
            if flag:
                variable.assign_add(1.0)
        world.strategy.run(step)
    program(tf.constant(True))
    assert variable.numpy() == world.replicas


@feature(GROUP, "ON_READ: SUM and MEAN when read")
def on_read(world: World) -> None:
    for aggregation, expected in ((Aggregation.SUM, sum(range(world.replicas + 1))),
                                  (Aggregation.MEAN, (world.replicas + 1) / 2)):
        variable = _make(world, 0.0, synchronization=ON_READ, aggregation=aggregation)
        assert _assigned(world, variable) == expected


@feature(GROUP, "`tf.train.Checkpoint` with an ON_READ variable")
def checkpoint(world: World) -> None:
    mirrored = _make(world, [1.0, 2.0])
    read = _make(world, 0.0, synchronization=ON_READ, aggregation=Aggregation.SUM)
    total = _assigned(world, read)
    saved = tf.train.Checkpoint(a=mirrored, b=read)
    path = saved.write(f"{world.directory}/process{world.rank}")  # Reading `b` is collective, so all write.
    mirrored.assign([0.0, 0.0])
    read.assign(0.0)
    saved.read(path).assert_consumed()
    np.testing.assert_array_equal(mirrored.numpy(), [1.0, 2.0])
    assert read.numpy() == total


@feature(GROUP, "`tf.train.Checkpoint` read before the variable is made")
def checkpoint_read_early(world: World) -> None:
    path = tf.train.Checkpoint(a=tf.Variable(7.0)).write(f"{world.directory}/process{world.rank}")
    later = tf.train.Checkpoint()
    status = later.read(path)
    later.a = _make(world, 0.0)
    status.assert_consumed()
    assert later.a.numpy() == 7.0
