"""ShardedOptimizer on every rank: the updates, files and states of an optimizer without sharding, divided."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.core.handle import Entry
from mpistrat.keras.bridge.private_names import states_in
from mpistrat.tensorflow import MPIStrategy
from mpistrat.tensorflow.xla import ffi

from ..support.levels import sample
from .helpers import assert_equal_on_all_ranks, both_ways, everywhere

TOKENS, ROWS = 300, 12
Optimizers = keras.optimizers


def new_model(seed: int = 1, strategy: Any = None, policy: str = "float32") -> Any:
    """An embedding that is divided between its rows, an array of its own, and small variables."""
    keras.utils.clear_session()  # The names of layers and of the optimizer's variables are those of each other model.
    keras.utils.set_random_seed(seed)
    with nullcontext() if strategy is None else strategy.scope():
        keras.config.set_dtype_policy(policy)
        model = keras.Sequential([
            keras.Input((3,)), keras.layers.Embedding(TOKENS, 60), keras.layers.Flatten(),
            keras.layers.Dense(100, activation="tanh", kernel_constraint="max_norm"), keras.layers.Dense(2)])
        keras.config.set_dtype_policy("float32")
        return model


def rows_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(rank)
    return generator.integers(0, TOKENS // 20, (ROWS, 3)), generator.normal(size=(ROWS, 2)).astype(np.float32)


def fit(model: Any, rank: int, *callbacks: Any, epochs: int = 1) -> Any:
    x, y = rows_of(rank)
    return model.fit(x, y, batch_size=3, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def compiled_model(optimizer: Any, **arguments: Any) -> Any:
    model = new_model()
    # XLA rounds a product and a sum once or twice, as it likes: the bits are those of steps that it does not compile.
    model.compile(optimizer, keras.losses.MeanSquaredError(), **{"jit_compile": False, **arguments})
    return model


def trained(optimizer: Any, rank: int, epochs: int = 1, **arguments: Any) -> Any:
    model = compiled_model(optimizer, **arguments)
    fit(model, rank, epochs=epochs)
    assert_equal_on_all_ranks([np.array(v) for v in [*model.weights, *model.optimizer.variables]])
    return model


def whole_state(optimizer: Any) -> list[np.ndarray]:
    """What the optimizer has in a file. Collective."""
    for state in states_in([optimizer]):
        state.consolidate(to=None)
    store: dict[str, Any] = {}
    optimizer.save_own_variables(store)
    return [store[str(i)] for i in range(len(store))]


def assert_same(model: Any, other: Any, rtol: float = 0.0) -> None:
    """Two models have the same weights and state, to the bit or within rounding."""
    for a, b in zip([*model.get_weights(), *whole_state(model.optimizer)],
                    [*other.get_weights(), *whole_state(other.optimizer)], strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


EXACT: dict[str, Callable[[], Any]] = {
    "SGD": lambda: Optimizers.SGD(0.1),
    "momentum": lambda: Optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: Optimizers.Adam(0.01),
    "AdamW": lambda: excluding(Optimizers.AdamW(0.01, weight_decay=0.1, amsgrad=True)),
    "clipvalue": lambda: Optimizers.Adam(0.01, clipvalue=0.01),
    "averages": lambda: Optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3),
    "of the user": lambda: Halved(0.01)}
CLOSE: dict[str, Callable[[], Any]] = {
    "Lamb": lambda: Optimizers.Lamb(0.01, clipnorm=0.1),
    "Adafactor": lambda: Optimizers.Adafactor(0.01),
    "clipnorm": lambda: Optimizers.Adam(0.01, epsilon=1e-3, clipnorm=0.1),
    "global clipnorm": lambda: Optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.1),
    "accumulates": lambda: Optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=2, clipnorm=0.1)}


class Halved(Optimizers.Adam):
    """An optimizer of the user, which mpistrat does not know."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient, variable, learning_rate / 2)


def excluding(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


@sample("name", EXACT)
def test_the_bits_are_those_without_sharding(name: str, rank: int) -> None:
    assert_same(trained(hvd.ShardedOptimizer(EXACT[name]()), rank),
                trained(hvd.DistributedOptimizer(EXACT[name]()), rank))


@sample("name", ["Adam", "AdamW"])
def test_the_bits_are_the_same_eagerly_and_in_a_loop(name: str, rank: int) -> None:
    assert_same(trained(hvd.ShardedOptimizer(EXACT[name]()), rank, run_eagerly=True),
                trained(hvd.DistributedOptimizer(EXACT[name]()), rank, run_eagerly=True))


@sample("name", CLOSE)
def test_norms_and_accumulation_differ_by_rounding(name: str, rank: int) -> None:
    assert_same(trained(hvd.ShardedOptimizer(CLOSE[name]()), rank),
                trained(hvd.DistributedOptimizer(CLOSE[name]()), rank), rtol=1e-5)


@pytest.mark.parametrize("arguments", [
    {"backward_passes_per_step": 2}, {"op": mpistrat.Sum}, {"compression": hvd.Compression.bf16},
    {"groups": 2}, {"sparse_as_dense": True}], ids=lambda arguments: next(iter(arguments)))
def test_arguments_mean_the_same(arguments: dict[str, Any], rank: int) -> None:
    assert_same(*(trained(hvd.DistributedOptimizer(Optimizers.SGD(0.05), shard_state=shard_state, **arguments), rank,
                          run_eagerly=True) for shard_state in (True, False)), rtol=1e-5)


def test_mixed_precision_scales_the_loss(rank: int) -> None:
    models = []
    for make in (hvd.ShardedOptimizer, hvd.DistributedOptimizer):
        optimizer = Optimizers.LossScaleOptimizer(make(Optimizers.Adam(0.01)), initial_scale=64.0)
        models.append(trained(optimizer, rank))
    assert_same(*models)


@pytest.mark.skipif(ffi.api() is None, reason="XLA compiles collectives with TensorFlow 2.21")
def test_xla_compiles_it(rank: int) -> None:
    assert_same(trained(hvd.ShardedOptimizer(Optimizers.SGD(0.1)), rank, jit_compile=True),
                trained(hvd.DistributedOptimizer(Optimizers.SGD(0.1)), rank, jit_compile=True), rtol=1e-5)


@pytest.fixture(scope="module")
def model() -> Any:
    return trained(hvd.ShardedOptimizer(Optimizers.Adam(0.01)), mpistrat.rank())


def test_a_rank_has_its_part_of_the_state(model: Any, size: int) -> None:
    slots = {id(v): v for name in ("_momentums", "_velocities") for v in getattr(model.optimizer, name)}
    own, weights = sum(int(np.prod(v.shape)) for v in slots.values()), model.count_params()
    assert own <= 2 * weights / size + 2 * 60
    assert sum(everywhere(own)) == 2 * weights
    assert not set(slots) & {id(v) for v in model.optimizer.variables}


def test_steps_go_through_a_reduce_scatter_and_a_gather(model: Any, rank: int, submitted: list[Entry]) -> None:
    submitted.clear()
    fit(model, rank)
    assert [entry.request.kind.name for entry in submitted].count("REDUCESCATTER") == ROWS // 3


@both_ways
def test_some_of_the_variables_in_any_order(way: Callable, rank: int, size: int) -> None:
    results = []
    for make in (hvd.ShardedOptimizer, hvd.DistributedOptimizer):
        variables = [keras.Variable(np.ones(shape, np.float32), name=f"w{i}")
                     for i, shape in enumerate([(5, 2), (3,), ()])]
        optimizer = make(Optimizers.Adam(0.1))
        optimizer.build(variables)
        step = way(lambda *g: optimizer.apply(g, [variables[2], variables[0]]))  # noqa: B023
        for i in range(3):
            step(tf.constant(float(rank + i)), tf.fill([5, 2], rank - 2.0 * i))
        results.append([v.numpy() for v in variables])
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)
    with pytest.raises(ValueError, match="was not built for"):
        hvd_optimizer = hvd.ShardedOptimizer(Optimizers.SGD(0.1))
        hvd_optimizer.build([variables[0]])
        hvd_optimizer.apply([tf.ones([3])], [variables[1]])


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sets(size: int) -> Iterator[list[Any]]:
    """All ranks, the first ranks but the last, and the first rank alone."""
    smaller = [hvd.add_process_set(range(count)) for count in range(size - 1, 0, -1)]
    yield [hvd.global_process_set, *smaller]
    for process_set in smaller:
        hvd.remove_process_set(process_set)


@sample("name", ["Adam", "Lamb", "accumulates"])
def test_training_goes_on_from_a_file_with_fewer_ranks(name: str, sets: list[Any], rank: int, shared_dir: str) -> None:
    files: dict[bool, list[Any]] = {}
    for shard_state in (False, True):
        model, path, files[shard_state] = None, "", []
        for process_set in sets:
            if process_set.included():
                arguments = {"shard_state": shard_state, "process_set": process_set}
                model = hvd.load_model(path, average_aggregated_gradients=True, **arguments) if model is not None else \
                    compiled_model(hvd.DistributedOptimizer((EXACT | CLOSE)[name](), **arguments))
                fit(model, rank)
            path = f"{shared_dir}/{shard_state}{len(files[shard_state])}.keras"
            if rank == 0:
                model.save(path)  # Alone: the state has been gathered when the epoch ended.
            mpistrat.barrier()
            files[shard_state].append(keras.models.load_model(path))
    for sharded, plain in zip(files[True], files[False], strict=True):
        assert [v.name for v in sharded.optimizer.variables] == [v.name for v in plain.optimizer.variables]
        assert_same(sharded, plain, 0.0 if name == "Adam" else 1e-4)


def test_what_one_rank_has_loaded_is_broadcast(model: Any, rank: int, shared_dir: str) -> None:
    model.optimizer.consolidate_state()
    if rank == 0:
        model.save_weights(f"{shared_dir}/model.weights.h5")
    mpistrat.barrier()
    other = compiled_model(hvd.ShardedOptimizer(Optimizers.Adam(0.01)))
    other.optimizer.build(other.trainable_variables)
    if rank == 0:
        other.load_weights(f"{shared_dir}/model.weights.h5")
    fit(other, rank, hvd.callbacks.BroadcastGlobalVariablesCallback(0))
    fit(model, rank)
    assert_same(other, model)


def test_callbacks_save_within_an_epoch_and_restore(model: Any, rank: int, shared_dir: str) -> None:
    within = keras.callbacks.ModelCheckpoint(f"{shared_dir}/{{batch}}.keras", save_freq=2)
    fit(model, rank, within, keras.callbacks.BackupAndRestore(f"{shared_dir}/backup", delete_checkpoint=False))
    saved = keras.models.load_model(f"{shared_dir}/4.keras")
    for a, b in zip([np.array(v) for v in saved.optimizer.variables], whole_state(model.optimizer), strict=True):
        assert np.array_equal(a, b)
    again = compiled_model(hvd.ShardedOptimizer(Optimizers.Adam(0.01)))
    fit(again, rank, keras.callbacks.BackupAndRestore(f"{shared_dir}/backup"), epochs=1)
    assert_same(again, model)


def test_a_rank_without_the_state_cannot_save_or_copy(model: Any, rank: int, size: int, shared_dir: str) -> None:
    x, y = rows_of(rank)
    model.train_on_batch(x, y)  # The state that fit has gathered is no longer the present one.
    for save in (lambda: model.save(f"{shared_dir}/{rank}.keras"), lambda: model.save(f"{shared_dir}/{rank}.h5"),
                 lambda: pickle.dumps(model.optimizer)):
        with pytest.raises(ValueError, match=r"optimizer\.consolidate_state\(\) on all ranks"):
            save()
    with pytest.raises(ValueError, match=r"tf\.train\.Checkpoint would save only this rank's part"):
        tf.train.Checkpoint(optimizer=model.optimizer).write(f"{shared_dir}/{rank}")
    model.optimizer.consolidate_state(to=size - 1)
    if rank == size - 1:
        model.save(f"{shared_dir}/last.keras")
        model.save(f"{shared_dir}/last.h5")
        shapes: list[Any] = []
        with h5py.File(f"{shared_dir}/last.h5") as file:
            file["optimizer_weights"].visititems(lambda name, item: shapes.append(getattr(item, "shape", None)))
        assert shapes.count((TOKENS, 60)) == 2
    mpistrat.barrier()


def test_a_copy_is_sharded_too(rank: int) -> None:
    model = trained(hvd.ShardedOptimizer(Optimizers.Adam(0.01)), rank)
    model.optimizer.consolidate_state(to=None)
    copied = copy.deepcopy(model)
    assert states_in([copied.optimizer])
    assert_same(copied, model)


def test_an_elastic_state_returns_to_its_commit(rank: int) -> None:
    model = trained(hvd.ShardedOptimizer(Optimizers.Adam(0.01)), rank)
    state = hvd.elastic.KerasState(model, epoch=0)
    before = whole_state(model.optimizer)
    fit(model, rank)
    state.restore()
    for a, b in zip(whole_state(model.optimizer), before, strict=True):
        assert np.array_equal(a, b)


def test_the_momentum_follows_the_learning_rate(rank: int) -> None:
    results = []
    for make in (hvd.ShardedOptimizer, hvd.DistributedOptimizer):
        model = compiled_model(make(Optimizers.SGD(0.1, momentum=0.9)))
        fit(model, rank, hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5 ** int(epoch)), epochs=3)
        results.append(model)
    assert_same(*results)


# -- what cannot be sharded -------------------------------------------------------------------------------------------


class Direct(Optimizers.Optimizer):
    """It has no update_step."""


@pytest.mark.parametrize(("optimizer", "arguments", "words"), [
    (lambda: Optimizers.LossScaleOptimizer(Optimizers.SGD(0.1)), {},
     r"LossScaleOptimizer\(hvd\.ShardedOptimizer\(\.\.\.\)\)"),
    (lambda: Direct(0.1), {}, r"Direct has no update_step\(\)"),
    (lambda: Optimizers.SGD(0.1), {"uneven": "join"}, "needs every rank in every step"),
    (lambda: Optimizers.SGD(0.1), {"op": mpistrat.Adasum}, "op currently only supports Average and Sum"),
    (lambda: Optimizers.SGD(0.1), {"compression": "int8"}, "compression must be one of .*Received: 'int8'"),
    (lambda: "adam", {}, "takes a Keras optimizer"),
    (lambda: hvd.DistributedOptimizer(Optimizers.SGD(0.1)), {}, "is distributed already")],
    ids=["passes on", "no update_step", "join", "adasum", "compression", "no optimizer", "distributed"])
def test_what_cannot_be_sharded_is_an_error_on_every_rank(optimizer: Callable, arguments: dict[str, Any],
                                                          words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hvd.ShardedOptimizer(optimizer(), **arguments)


@sample("is_under_strategy", [False, True])
def test_swapped_averages_are_an_error_on_every_rank(is_under_strategy: bool, rank: int, size: int) -> None:
    optimizer = Optimizers.SGD(0.1, use_ema=True)
    strategy = MPIStrategy(variables="sharded") if is_under_strategy else None
    model = new_model(strategy=strategy)
    with nullcontext() if strategy is None else strategy.scope():
        model.compile(optimizer if is_under_strategy else hvd.ShardedOptimizer(optimizer), "mse", jit_compile=False)
    with nullcontext() if size == 1 else pytest.raises(ValueError, match="SwapEMAWeights does not work"):
        fit(model, 0, keras.callbacks.SwapEMAWeights())


def test_it_does_not_go_into_the_scope_of_a_strategy(size: int) -> None:
    strategy = MPIStrategy(variables="sharded")
    model = new_model(strategy=strategy)
    with strategy.scope():
        model.compile(hvd.ShardedOptimizer(Optimizers.SGD(0.1)), "mse", jit_compile=False)
    with nullcontext() if size == 1 else pytest.raises(ValueError, match="would average gradients twice"):
        fit(model, 0)


@sample("weight_decay", [None, 0.1])
def test_fit_without_a_broadcast_is_an_error_on_every_rank(weight_decay: float | None, rank: int, size: int) -> None:
    """A step makes the weights equal, but of parts of each rank's. So it is in the second fit."""
    model = compiled_model(hvd.ShardedOptimizer(Optimizers.SGD(0.1, weight_decay=weight_decay)))
    fit(model, rank)
    if rank == 0:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    with nullcontext() if size == 1 else pytest.raises(mpistrat.MismatchError, match="the ranks train different weigh"):
        fit(model, rank)
    if rank == 0:
        model.set_weights([weight + 1 for weight in model.get_weights()])
    fit(model, rank, hvd.callbacks.BroadcastGlobalVariablesCallback(0))


def test_local_variables_are_an_error_on_every_rank() -> None:
    with pytest.raises(ValueError, match="a sharded optimizer does not support local variables"):
        hvd.ShardedOptimizer(Optimizers.SGD(0.1)).register_local_var(keras.Variable(1.0))
