"""Weights and slots that drift apart within an epoch of fit are found there: an error, or a warning."""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.api import runtime
from mpistrat.keras.fit.fit_checks import ChecksWithinEpochs
from mpistrat.tensorflow import MPIStrategy, consistency

from ..support.levels import sample
from .helpers import everywhere

BATCH, BATCHES, EVERY = 4, 12, 4
HERE = "fit: before batch 9 of epoch 1"  # The second check; Poke changes something before it, after the first.


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """As with MPISTRAT_CHECK_EVERY and MPISTRAT_CHECK_ACTION."""
    own = runtime.current()
    before = own.settings
    monkeypatch.setattr(consistency, "_has_warned_of_rounding", False)

    def set_settings(every: int = EVERY, action: str = "abort") -> None:
        own.settings = dataclasses.replace(before, check_every=every, check_action=action)
    yield set_settings
    own.settings = before


def layers() -> list[Any]:
    return [keras.Input((3,)), keras.layers.Dense(4, name="first"), keras.layers.BatchNormalization(),
            keras.layers.Dense(1, name="last")]


def horovods(**arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers())
    inner = keras.optimizers.SGD(0.01, momentum=0.9, **arguments)
    model.compile(hvd.DistributedOptimizer(inner), "mse", jit_compile=False)
    return model


def strategys(**arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    with MPIStrategy().scope():
        model = keras.Sequential(layers())
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9, **arguments), "mse")
    return model


DOORS = [horovods, strategys]


class Poke(keras.callbacks.Callback):
    def __init__(self, name: str, factor: float = 1.5, batch: int = 7):
        super().__init__()
        self.name, self.factor, self.batch = name, factor, batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == self.batch:
            variable, = (v for v in [*self.model.weights, *self.model.optimizer.variables] if self.name in v.path)
            variable.assign(variable * self.factor)


def fit(model: Any, rank: int, callbacks: list[Any], batches: int = BATCHES) -> Any:
    """One epoch. A model of a strategy gets the rows of all ranks."""
    size = mpistrat.size() if isinstance(model.distribute_strategy, MPIStrategy) else 1
    x = np.random.default_rng(5 if size > 1 else rank).normal(size=(BATCH * batches * size, 3)).astype(np.float32)
    return model.fit(x, x[:, :1], batch_size=BATCH * size, verbose=0, callbacks=callbacks, shuffle=False)


def warnings_in(caplog: pytest.LogCaptureFixture, text: str = "the ranks have different weights") -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("door, name", [
    (horovods, "first/kernel"), (horovods, "momentum"), (strategys, "first/kernel"),
    pytest.param(strategys, "momentum", marks=pytest.mark.nightly)])
def test_a_difference_within_an_epoch_is_an_error_on_every_rank(door: Callable, name: str, rank: int, size: int,
                                                               checked: Callable) -> None:
    checked()
    with pytest.raises(mpistrat.MismatchError) as caught:
        fit(door(), rank, [Poke(name if name != "momentum" else "first_kernel_momentum")] if rank == 0 else [])
    found = str(caught.value)
    assert f"{HERE} the ranks have different weights" in found
    assert ("first_kernel_momentum" if name == "momentum" else "first/kernel") in found.partition(" differ between ")[0]
    assert f" differ between ranks [0] and {list(range(1, size))}." in found
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0] == size  # The engine goes on.


@sample("door", DOORS)
def test_a_difference_may_be_a_warning(door: Callable, rank: int, checked: Callable,
                                       caplog: pytest.LogCaptureFixture) -> None:
    checked(action="warn")
    model = door()
    fit(model, rank, [Poke("first/kernel")] if rank == 0 else [])
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) > 1
    found = warnings_in(caplog)
    assert [HERE in text for text in found] == ([] if rank else [True, False])
    assert all("Training goes on with different weights, because MPISTRAT_CHECK_ACTION is warn." in text
               for text in found)


@sample("door", DOORS)
def test_rounding_is_warned_of_whatever_the_action_is(door: Callable, rank: int, checked: Callable,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    checked(every=1)
    fit(door(), rank, [Poke("first/kernel", 1 + 1e-6)] if rank == 0 else [])
    assert len(warnings_in(caplog, f"{HERE} the weights of the ranks differ by rounding")) == (0 if rank else 1)


@sample("door", DOORS)
def test_zero_leaves_only_the_check_at_the_end(door: Callable, rank: int, checked: Callable) -> None:
    checked(every=0)
    with pytest.raises(mpistrat.MismatchError, match="fit: at the end of epoch 1 the ranks have different weights"):
        fit(door(), rank, [Poke("first/kernel")] if rank == 0 else [])


@pytest.mark.parametrize("door", DOORS)
def test_an_execution_of_several_steps_counts_its_batches(door: Callable, rank: int, checked: Callable) -> None:
    checked()
    model = door()
    model.steps_per_execution = 3
    with pytest.raises(mpistrat.MismatchError, match="fit: before batch 7 of epoch 1 the ranks have different weights"):
        fit(model, rank, [Poke("first/kernel", batch=5)] if rank == 0 else [])


@sample("door", DOORS)
def test_sums_of_gradients_running_statistics_and_local_weights_may_differ(door: Callable, rank: int,
                                                                           checked: Callable) -> None:
    checked(every=1)
    model = door(gradient_accumulation_steps=3)
    if door is horovods:
        for weight in model.layers[-1].weights:
            model.optimizer.register_local_var(weight)
    fit(model, rank, [])
    kernels = everywhere([model.get_weights()[i].tobytes() for i in (0, -2)])
    assert len({shared for shared, _ in kernels}) == 1
    assert (len({own for _, own in kernels}) == len(kernels)) is (door is horovods)


def test_ranks_that_join_are_compared_when_the_epoch_ends(rank: int, checked: Callable) -> None:
    checked(every=1)
    model = horovods()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), uneven="join"), "mse", jit_compile=False)
    fit(model, rank, [], batches=BATCHES - 2 * (rank == 0))
    assert len(set(everywhere(model.get_weights()[0].tobytes()))) == 1


def test_ranks_of_a_process_set_are_named_as_ranks_of_the_job(rank: int, size: int, checked: Callable,
                                                              caplog: pytest.LogCaptureFixture) -> None:
    if size < 3:
        pytest.skip("a set of two ranks without rank 0")
    checked(action="warn")
    ranks = hvd.add_process_set([1, 2])
    model = horovods()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), process_set=ranks), "mse", jit_compile=False)
    fit(model, rank, [Poke("first/kernel")] if rank == 2 else [])
    hvd.remove_process_set(ranks)
    found = warnings_in(caplog)
    assert len(found) == (2 if rank == 1 else 0)
    assert all("differ between ranks [1] and [2]." in text for text in found)


def test_weights_are_compared_after_ten_batches_for_the_first_time() -> None:
    places: list[str] = []
    checks = ChecksWithinEpochs(places.append, 1000, SimpleNamespace(is_synchronised=True))
    for epoch in range(2):
        checks.on_epoch_begin(epoch)
        for batch in range(1200):
            checks.on_train_batch_begin(batch)
    assert places == ["fit: before batch 11 of epoch 1", "fit: before batch 1011 of epoch 1",
                      "fit: before batch 1001 of epoch 2"]


class Generator(keras.Sequential):
    """Has an optimizer of its own besides that of compile, for its last layer."""

    def train_step(self, data: Any) -> dict[str, Any]:
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:2], weights[:2])
        self.own.apply(gradients[2:], weights[2:])
        return {"loss": loss}


def test_an_optimizer_that_is_not_distributed_is_named(checked: Callable, rank: int) -> None:
    checked()
    keras.utils.set_random_seed(1)
    model = Generator([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    model.own = keras.optimizers.Adam(0.1, name="own")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), jit_compile=False)
    with pytest.raises(mpistrat.MismatchError, match=r"without hvd\.DistributedOptimizer: own \(Adam\)\."):
        fit(model, rank, [])
