"""Features of saving and loading, every process to a file of its own unless the title says otherwise."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from .common import World, assert_close, assert_equal_on_all, feature, of_all_processes, points
from .keras_training import BATCH, both, compiled, fit_both, sequential, trains_as_one_process

GROUP = "Keras: files"


def _own_path(world: World, suffix: str) -> str:
    return f"{world.directory}/process{world.rank}{suffix}"


@feature(GROUP, "`.keras`: saved, loaded, and training goes on")
def keras_file(world: World) -> None:
    model, reference = trains_as_one_process(world)
    path = _own_path(world, ".keras")
    model.save(path)
    with world.strategy.scope():
        loaded = keras.models.load_model(path)
    assert_close(loaded.get_weights(), model.get_weights(), 0)
    fit_both(world.strategy, loaded, reference)


@feature(GROUP, "`.keras` of one process, trained on with a strategy")
def keras_file_of_one_process(world: World) -> None:
    reference = compiled()
    path = _own_path(world, ".keras")
    keras.utils.set_random_seed(3)
    reference.fit(*points(60), batch_size=BATCH, verbose=0)
    reference.save(path)
    of_all_processes(None)
    with world.strategy.scope():
        model = keras.models.load_model(f"{world.directory}/process0.keras")
    reference.set_weights(model.get_weights())
    assert_equal_on_all(model.get_weights())
    reference.optimizer.learning_rate.assign(0.0)
    model.optimizer.learning_rate.assign(0.0)
    x, y = points(60)
    assert_close(model.evaluate(x, y, verbose=0), reference.evaluate(x, y, verbose=0))
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert_equal_on_all(model.get_weights())


@feature(GROUP, "`.h5`")
def h5_file(world: World) -> None:
    model, _ = trains_as_one_process(world)
    path = _own_path(world, ".h5")
    model.save(path)
    with world.strategy.scope():
        loaded = keras.models.load_model(path, compile=False)
    assert_close(loaded.get_weights(), model.get_weights(), 0)


@feature(GROUP, "`.weights.h5`")
def weights_file(world: World) -> None:
    model, _ = trains_as_one_process(world)
    path = _own_path(world, ".weights.h5")
    model.save_weights(path)
    with world.strategy.scope():
        loaded = compiled()
    loaded.load_weights(path)
    assert_close(loaded.get_weights(), model.get_weights(), 0)


@feature(GROUP, "`export` to a SavedModel")
def exported(world: World) -> None:
    model, reference = trains_as_one_process(world)
    path = _own_path(world, "")
    model.export(path, verbose=False)
    x, _ = points(6)
    served = tf.saved_model.load(path)
    np.testing.assert_allclose(served.serve(x), reference.predict(x, verbose=0), atol=1e-5)


@feature(GROUP, "`tf.train.CheckpointManager` of model and optimizer")
def checkpoint_manager(world: World) -> None:
    def checkpoint_of(model: Any) -> Any:
        return tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=model.optimizer),
                                          _own_path(world, ""), max_to_keep=2)
    model, reference = trains_as_one_process(world)
    path = checkpoint_of(model).save()
    with world.strategy.scope():
        later = compiled()
        later.optimizer.build(later.trainable_variables)
    assert checkpoint_of(later).restore_or_initialize() == path
    fit_both(world.strategy, later, reference)


@feature(GROUP, "A model with `BatchNormalization`, read back without a strategy")
def read_without_strategy(world: World) -> None:
    with world.strategy.scope():
        model = compiled(lambda: sequential(keras.layers.BatchNormalization()))
    x, y = points(60)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    path = _own_path(world, ".keras")
    model.save(path)
    loaded = keras.models.load_model(path)
    assert_equal_on_all(loaded.get_weights())
    assert_close([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])


@feature(GROUP, "`clone_model` and `get_config`")
def cloned(world: World) -> None:
    model, _ = both(world.strategy, world.rank)
    with world.strategy.scope():
        clone = keras.models.clone_model(model)
        clone.compile("sgd", "mse")
    clone.set_weights(model.get_weights())
    clone.fit(*points(60), batch_size=BATCH, verbose=0)
    assert_equal_on_all(clone.get_weights())
