"""Ranks that train different weights get an error, and ranks that train on the same data a warning."""

import logging
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
import mpistrat.tensorflow as tape_hvd
from mpistrat.api import runtime
from mpistrat.tensorflow import consistency

from ..support.levels import sample
from .helpers import assert_equal_on_all_ranks

COLUMNS, ROWS, BATCH = 5, 32, 8
SAME_DATA = "all ranks train on the same data"
broadcast = pytest.mark.parametrize("are_broadcast", [True, False], ids=["broadcast", "different"])


def different_on(size: int) -> str:
    return "differ between ranks " + (" and " if size == 2 else ", ").join(
        rf"\[{rank}\]" for rank in range(size)) + r"\."


def new_model(rank: int, kind: str = "input") -> Any:
    keras.utils.set_random_seed(rank)
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((COLUMNS,)), *layers] if kind == "input" else layers)


def data_of(rank: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).standard_normal((rows, COLUMNS)).astype(np.float32)
    return x, x[:, :1]


def fit(model: Any, data: tuple[np.ndarray, np.ndarray], callbacks: Sequence[Any] = (), epochs: int = 1,
        **arguments: Any) -> Any:
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False, **arguments)
    return model.fit(*data, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


@pytest.fixture(autouse=True)
def _first_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no tape had been used before."""
    monkeypatch.setattr(consistency, "_of_tapes", weakref.WeakKeyDictionary())


# -- different weights ------------------------------------------------------------------------------------------------


def test_fit_without_a_broadcast_is_an_error_on_every_rank(rank: int, size: int) -> None:
    text = f"the values of .*first/kernel {different_on(size)} The same holds for 1 more of 4"
    with pytest.raises(tf.errors.OpError, match=text) as caught:
        fit(new_model(rank), data_of(rank))
    # The frames hold a dataset that nothing reads to its end. TensorFlow waits for its threads when it is deleted, the
    # longer the later.
    traceback.clear_frames(caught.tb)
    assert hvd.allreduce(1.0, op=hvd.Sum).numpy() == size  # The engine goes on.


@sample("run_eagerly", [False, True], ids=["graph", "eager"])
@sample("kind", ["input", "no input"])
def test_batches_without_a_broadcast_are_an_error_on_every_rank(kind: str, run_eagerly: bool, rank: int,
                                                                size: int) -> None:
    model = new_model(rank, kind)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse", jit_compile=False,
                  run_eagerly=run_eagerly)
    for _ in range(2):
        model.train_on_batch(*data_of(rank))
    with pytest.raises(tf.errors.OpError, match=f"the values of .*first/kernel {different_on(size)}"):
        model.train_on_batch(*data_of(rank))


def test_fit_of_two_steps_is_checked_at_its_end(rank: int, size: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match="the ranks train different weights"):
        fit(new_model(rank), data_of(rank, 2 * BATCH))


@sample("steps", [1, 4], ids=["step by step", "four steps at once"])
def test_weights_that_the_first_batch_creates_are_broadcast_after_it(steps: int, rank: int) -> None:
    model = new_model(rank, "no input")
    fit(model, data_of(rank), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], epochs=2, steps_per_execution=steps)
    assert_equal_on_all_ranks(model.get_weights())


@broadcast
@pytest.mark.parametrize("in_graph", [True, False], ids=["graph", "eager"])
def test_a_loop_may_broadcast_after_its_first_step(in_graph: bool, are_broadcast: bool, rank: int, size: int) -> None:
    weights = [tf.Variable([float(rank + 1)], name="own"), tf.Variable([1.0])]

    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weights[0] * x + weights[1])
        tape = tape_hvd.DistributedGradientTape(tape)
        for weight, gradient in zip(weights, tape.gradient(loss, weights)):
            weight.assign_sub(0.1 * gradient)

    def train() -> None:
        call = tf.function(step, autograph=False) if in_graph else step
        for number in range(5):
            # One rank traces anew, alone.
            call(tf.ones([number + 1 if rank == 0 else 1]))
            if number == 0 and are_broadcast:
                tape_hvd.broadcast_variables(weights, root_rank=0)

    if are_broadcast:
        train()
        assert_equal_on_all_ranks([weight.numpy() for weight in weights])
        return
    if in_graph:
        train()  # Not compared: the loop might change a weight before its gradient is reduced.
        return
    with pytest.raises(tf.errors.OpError, match=f"the values of own.* {different_on(size)} Broadcast the weights"):
        train()
    assert weights[1].numpy() != 1.0  # Two steps were made.


def test_weight_decay_before_the_reduction_is_no_false_alarm(rank: int) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), *[keras.layers.Dense(64) for _ in range(6)], keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01, weight_decay=0.5)), loss="mse")
    x = np.random.default_rng(rank).normal(size=(64, 4)).astype(np.float32)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0)
    assert not model.optimizer._mpistrat.reducer.checks._exchanges


def test_two_tapes_of_a_step_with_variables_in_common_are_two_to_check(rank: int) -> None:
    encoder, actor, critic = (tf.Variable([float(rank + 1)]) for _ in range(3))
    for number in range(5):
        with tf.GradientTape(persistent=True) as tape:
            losses = encoder * actor * (rank + 1.0), encoder * critic * (rank + 2.0)
        tape = tape_hvd.DistributedGradientTape(tape)
        for loss, head in zip(losses, (actor, critic)):
            tape.gradient(loss, [encoder, head])
        if number == 0:
            tape_hvd.broadcast_variables([encoder, actor, critic], root_rank=0)
    assert_equal_on_all_ranks([encoder.numpy(), actor.numpy(), critic.numpy()])


def test_two_optimizers_of_a_graph_may_share_variables(rank: int) -> None:
    """The first may have changed the encoder when the second one's callback would read it."""
    encoder = [keras.Variable(np.eye(64, dtype=np.float32)) for _ in range(6)]
    heads = [keras.Variable(np.ones((64, 1), np.float32)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)) for _ in heads]
    for optimizer, head in zip(optimizers, heads):
        optimizer.build([*encoder, head])

    @tf.function(autograph=False)
    def step(x: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            for kernel in encoder:
                x = tf.tanh(x @ kernel)
            losses = [tf.reduce_mean((x @ head - i) ** 2) for i, head in enumerate(heads)]
        gradients = [tape.gradient(loss, [*encoder, head]) for loss, head in zip(losses, heads)]
        for i, head in enumerate(heads):
            optimizers[i].apply(gradients[i], [*encoder, head])

    data = np.random.default_rng(rank).normal(size=(16, 64)).astype(np.float32)
    for _ in range(5):
        step(tf.constant(data))
    assert_equal_on_all_ranks([*encoder, *heads])
    found = [consistency.read_alone([*encoder, head], optimizer._mpistrat.reducer.name)
             for optimizer, head in zip(optimizers, heads)]
    assert [len(variables) for variables in found] == [7, 1]
    assert found[1][0] is heads[1]


@pytest.mark.parametrize("kind", ["tape", "optimizer"])
def test_weights_that_each_rank_adapts_on_purpose_need_not_be_equal(kind: str, rank: int) -> None:
    """MAML of first order."""
    weight = keras.Variable(np.ones(4, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), check_weights=False)
    for _ in range(5):
        common = weight.numpy()
        weight.assign_sub(np.full(4, 0.1 * rank, np.float32))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        if kind == "tape":
            tape = tape_hvd.DistributedGradientTape(tape, check_weights=False)
            gradient = tape.gradient(loss, weight.value)
            weight.assign(common - 0.1 * gradient)
        else:
            gradient = tape.gradient(loss, weight.value)
            weight.assign(common)
            optimizer.apply([gradient], [weight])
    assert_equal_on_all_ranks([weight.numpy()])


def test_a_new_variable_in_each_step_leaves_nothing_behind(rank: int) -> None:
    decoder, kept = tf.Variable(tf.ones([4])), []
    for _ in range(70):
        latent = tf.Variable(tf.ones([4]))
        if rank == 1:
            kept.append(latent)  # Other ranks use its memory again.
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(decoder * latent) * (1.0 + rank)
        tape_hvd.DistributedGradientTape(tape).gradient(loss, [decoder, latent])
    mpistrat.barrier()
    checks, = consistency._of_tapes[runtime.current().world].values()
    assert len(checks._exchanges) == 24 + 8 + 6  # The next ones follow after 128 steps.
    assert not runtime.current().engine.controller.queue.in_flight()


def test_another_training_in_the_same_process_is_checked_too(rank: int, size: int) -> None:
    def train(weight: Any, steps: int) -> None:
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(weight * weight)
            tape_hvd.DistributedGradientTape(tape).gradient(loss, weight)

    train(tf.Variable([1.0]), 50)
    with pytest.raises(tf.errors.OpError, match=f"the values of second.* {different_on(size)}"):
        train(tf.Variable([float(rank)], name="second"), 50)


def test_the_variable_that_differs_is_named_as_in_its_own_step(rank: int, size: int) -> None:
    first, second = tf.Variable([1.0], name="first"), tf.Variable([float(rank)], name="second")
    last = tf.Variable([1.0], name="last")
    checks = consistency.FirstSteps("names")
    with pytest.raises(mpistrat.MismatchError, match=f"the values of second {different_on(size)}"):
        for number in range(5):
            variables = [first, second] if number < 2 else [last]
            observe = checks.observer(variables, [v.name.split(":")[0] for v in variables])
            assert observe is not None
            observe([np.array([rank + 1.0])], "")
            mpistrat.barrier()


def test_weights_may_be_made_equal_in_any_way(rank: int) -> None:
    weight = keras.Variable([float(rank)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    for step in range(5):
        optimizer.apply([tf.fill([1], rank + 1.0)], [weight])
        if step == 0:
            weight.assign(mpistrat.broadcast_object(weight.numpy(), 0))
    assert_equal_on_all_ranks([weight.numpy()])


def test_variables_of_each_rank_are_exempt(rank: int) -> None:
    weights = [keras.Variable([float(rank)]), keras.Variable([0.0])]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.register_local_var(weights[0])
    for _ in range(5):
        optimizer.apply([tf.fill([1], rank + 1.0)] * 2, weights)
    assert_equal_on_all_ranks([weights[1].numpy()])


@sample("in_graph", [True, False], ids=["graph", "eager"])
def test_a_model_of_sparse_gradients_only_is_checked(in_graph: bool, rank: int, size: int) -> None:
    table = keras.Variable(np.full((4, 2), float(rank), np.float32), name="table")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([table])

    def step() -> None:
        optimizer.apply([tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([4, 2]))], [table])

    call = tf.function(step, autograph=False) if in_graph else step
    with pytest.raises(tf.errors.OpError, match=f"the values of table {different_on(size)}"):
        for _ in range(3):
            call()


def test_optimizers_that_the_ranks_reach_in_other_orders_are_checked(rank: int, size: int,
                                                                     restart: Callable[[], None]) -> None:
    optimizers = [hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)) for _ in range(2)]
    weights = [keras.Variable([0.0]), keras.Variable([float(rank), 0.0], name="second")]
    for optimizer, weight in zip(optimizers, weights):
        optimizer.build([weight])

    def apply(i: int) -> None:
        optimizers[i].apply([tf.ones(weights[i].shape)], [weights[i]])

    @tf.function(autograph=False)
    def step() -> None:
        for i in (0, 1) if rank == 0 else (1, 0):
            apply(i)

    # In the third step rank 0 has submitted the first optimizer's gradient before the error, which ends the engines. A
    # rank that comes later raises that, or that the other one has shut down.
    with pytest.raises(tf.errors.OpError, match=f"the values of second {different_on(size)}|on rank 0 the tf.function|"
                                                "which have already shut down"):
        for _ in range(3):
            step()
    restart()


@pytest.mark.usefixtures("without_checks")
def test_the_check_can_be_left_out(rank: int, size: int) -> None:
    model = new_model(rank)
    fit(model, data_of(rank))
    assert len(set(mpistrat.allgather_object(model.get_weights()[0].tobytes()))) == size


# -- the same data ----------------------------------------------------------------------------------------------------


@pytest.fixture
def warnings(no_warning_yet: None, caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of these checks on this rank so far, as if none had been given before the test."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
                    and record.name.startswith(("mpistrat.keras", "mpistrat.tensorflow"))]


@sample("kind", ["input", "no input"])
def test_the_chief_warns_once_of_the_same_data_on_all_ranks(kind: str, rank: int, warnings: Callable) -> None:
    for _ in range(2):
        fit(new_model(rank, kind), data_of(0, 5 * BATCH), [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    found = [text for text in warnings() if SAME_DATA in text]
    assert len(found) == (1 if rank == 0 else 0)
    assert all(text.startswith("mpistrat: ") for text in found)
    assert all("Give each rank its own rows: x, y = hvd.shard(x, y)." in text for text in found)


def test_a_short_training_is_looked_at_when_it_ends(rank: int, warnings: Callable) -> None:
    fit(new_model(0), data_of(0, 2 * BATCH))
    assert len([text for text in warnings() if SAME_DATA in text]) == (1 if rank == 0 else 0)


def test_a_loop_that_trains_on_the_same_data_is_found_too(rank: int, warnings: Callable) -> None:
    weight = tf.Variable([1.0])
    for _ in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * weight)
        weight.assign_sub(0.1 * tape_hvd.DistributedGradientTape(tape).gradient(loss, weight))
    assert len([text for text in warnings() if SAME_DATA in text]) == (1 if rank == 0 else 0)


@pytest.mark.parametrize("gradients", [[0.0] * 5, [float("nan")] * 5, [1.0, "rank", 1.0, 1.0, 1.0]],
                         ids=["zero", "nan", "different once"])
def test_equal_gradients_that_say_nothing_are_no_reason_to_warn(gradients: list, rank: int, warnings: Callable) -> None:
    weight, optimizer = keras.Variable([0.0]), hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for value in gradients:
        optimizer.apply([tf.fill([1], float(rank) if value == "rank" else value)], [weight])
    assert not warnings()


def test_own_data_of_each_rank_are_no_reason_to_warn(rank: int, warnings: Callable) -> None:
    fit(new_model(0), data_of(rank, 5 * BATCH))
    assert not warnings()


@pytest.mark.parametrize("op", [mpistrat.Average, mpistrat.Sum], ids=["average", "sum"])
def test_gradients_that_a_tape_and_an_optimizer_reduce_are_no_equal_data(op: mpistrat.ReduceOp, rank: int,
                                                                         warnings: Callable) -> None:
    weight, optimizer = keras.Variable([1.0]), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=op)
    for step in range(5):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * float(rank + step + 1))
        gradients = tape_hvd.DistributedGradientTape(tape, op=op).gradient(loss, [weight])
        optimizer.apply([tf.clip_by_norm(gradients[0], 1.0)], [weight])
    found = warnings()
    assert len(found) == (1 if rank == 0 else 0)
    assert all(text.startswith("mpistrat: gradients are reduced twice: by a DistributedGradientTape") for text in found)


@pytest.mark.parametrize("generator_first", [False, True])
def test_the_same_noise_on_all_ranks_is_no_equal_data(generator_first: bool, rank: int, warnings: Callable) -> None:
    """As in a GAN after one seed on all ranks: only the discriminator sees the ranks' own images."""
    both = {name: (keras.Variable([1.0]), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
            for name in ("generator", "discriminator")}
    for step in range(5):
        for name in sorted(both, reverse=generator_first):
            weight, optimizer = both[name]
            optimizer.apply([tf.fill([1], float(step + 1 + (rank if name == "discriminator" else 0)))], [weight])
    assert not warnings()
