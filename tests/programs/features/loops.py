"""Features of training loops of one's own, with Keras' models and optimizers."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import World, assert_close, assert_equal_on_all, feature, points
from .keras_training import BATCH, both, sequential, sgd

GROUP = "Training loops"
ROWS = 60


def _made() -> Any:
    model = sequential()
    model.optimizer = sgd()
    model.optimizer.build(model.trainable_variables)
    return model


def _made_without_slots() -> Any:
    model = sequential()
    model.optimizer = sgd()
    return model


def _step_of(model: Any, batch_size: int, **metrics: Any) -> Any:
    """A training step of the rows of one replica; returns its part of the loss of the global batch."""
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            errors = tf.reduce_mean((model(x, training=True) - y) ** 2, axis=-1)
            loss = tf.nn.compute_average_loss(errors, global_batch_size=batch_size)
        model.optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
        for metric in metrics.values():
            metric.update_state(errors)
        return loss
    return step


def _dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(points(ROWS)).batch(BATCH)


def _assert_like_one_process(model: Any, reference: Any, losses: Any) -> None:
    """The same weights and losses as a plain loop over the global batches."""
    step = tf.function(_step_of(reference, BATCH))
    expected = [float(step(*batch)) for batch in _dataset()]
    assert_equal_on_all(model.get_weights())
    assert_close(model.get_weights(), reference.get_weights())
    assert_close(losses, expected)


def _loop(world: World, way: Any, make: Any = _made) -> None:
    model, reference = both(world.strategy, world.rank, make)
    step = _step_of(model, BATCH)
    program = way(lambda batch: world.strategy.reduce("SUM", world.strategy.run(step, args=batch), axis=None))
    losses = [float(program(batch)) for batch in world.strategy.experimental_distribute_dataset(_dataset())]
    _assert_like_one_process(model, reference, losses)


@feature(GROUP, "A step in `tf.function`: as one process")
def loop_of_functions(world: World) -> None:
    _loop(world, tf.function)


@feature(GROUP, "A step in `tf.function` that makes the optimizer's variables")
def loop_that_makes_slots(world: World) -> None:
    _loop(world, tf.function, _made_without_slots)


@feature(GROUP, "A step not in `tf.function`: as one process")
def loop_of_eager_steps(world: World) -> None:
    _loop(world, lambda function: function)


@feature(GROUP, "Steps in a loop in `tf.function`: as one process")
def loop_in_graph(world: World) -> None:
    model, reference = both(world.strategy, world.rank, _made)
    step = _step_of(model, BATCH)

    @tf.function
    def program(iterator: Any) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, ROWS // BATCH)
        for i in tf.range(ROWS // BATCH):
            loss = world.strategy.run(step, args=next(iterator))
            losses = losses.write(i, world.strategy.reduce("SUM", loss, axis=None))
        return losses.stack()
    losses = program(iter(world.strategy.experimental_distribute_dataset(_dataset())))
    _assert_like_one_process(model, reference, losses.numpy())


@feature(GROUP, "Keras' metrics are of all rows")
def loop_with_metrics(world: World) -> None:
    model, _ = both(world.strategy, world.rank, _made)
    with world.strategy.scope():
        mean = keras.metrics.Mean()
    step = _step_of(model, BATCH, mean=mean)
    total = tf.function(lambda batch: world.strategy.reduce("SUM", world.strategy.run(step, args=batch), axis=None))
    losses = [float(total(batch)) for batch in world.strategy.experimental_distribute_dataset(_dataset())]
    np.testing.assert_allclose(float(mean.result()), np.mean(losses), atol=1e-6)
    mean.reset_state()
    assert float(mean.result()) == 0.0


@feature(GROUP, "Gradient accumulation by hand, in `tf.cond`")
def accumulation_by_hand(world: World) -> None:
    with world.strategy.scope():
        weight, total, steps = (tf.Variable(0.0, synchronization=tf.VariableSynchronization.AUTO) for _ in range(3))

    @tf.function
    def program() -> None:
        def step() -> None:
            total.assign_add(1.0)
            steps.assign_add(1.0)
            if tf.equal(steps % 2, 0):
                weight.assign_add(tf.distribute.get_replica_context().all_reduce("SUM", total.read_value()))
                total.assign(0.0)
        world.strategy.run(step)
    for _ in range(4):
        program()
    assert weight.numpy() == 4.0 * world.replicas


@feature(GROUP, "Gradients averaged and applied by hand")
def averaged_by_hand(world: World) -> None:
    with world.strategy.scope():
        weight = tf.Variable([1.0, 2.0])

    @tf.function
    def program() -> None:
        def step() -> None:
            context = tf.distribute.get_replica_context()
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight ** 2) * tf.cast(context.replica_id_in_sync_group, tf.float32)
            gradient = context.all_reduce("MEAN", tape.gradient(loss, weight))
            context.merge_call(lambda s, g: s.extended.update(weight, lambda v, g: v.assign_sub(0.1 * g), args=(g,)),
                               args=(gradient,))
        world.strategy.run(step)
    program()
    factor = 1.0 - 0.1 * (world.replicas - 1)
    assert_close([weight.numpy()], [[factor, 2.0 * factor]])
