"""Keras under MPIStrategy: what is special to it. What every strategy should do is in test_features.py."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

import mpistrat.keras  # noqa: E402
from mpistrat.tensorflow import MPIStrategy  # noqa: E402

from ..features.keras_models import Subclassed  # noqa: E402
from ..features.keras_training import BATCH, both, compiled, dense, fit_both, sequential, sgd  # noqa: E402
from .strategy_helpers import assert_close, assert_equal_on_all_ranks, collectives_counted, global_data  # noqa: E402


@pytest.fixture(scope="module")
def strategy() -> MPIStrategy:
    return MPIStrategy()


@pytest.mark.parametrize("build", [sequential, lambda: keras.Sequential(dense()), Subclassed])
def test_fit_evaluate_and_predict(strategy: MPIStrategy, build: Callable, rank: int) -> None:
    model, reference = both(strategy, rank, lambda: compiled(build))
    x, y = global_data(73)
    fit_both(strategy, model, reference, rows=73, validation_data=(x[:40], y[:40]))
    assert_close(model.evaluate(x, y, batch_size=BATCH, verbose=0),
                 reference.evaluate(x, y, batch_size=BATCH, verbose=0), 1e-5)
    assert_close([model.predict(x, batch_size=BATCH, verbose=0)], [reference.predict(x, verbose=0)], 1e-5)


def test_a_step_of_fit_is_one_collective(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, verbose=0)
    with collectives_counted() as names:
        model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0)
    steps = [name for name in names if "()/strategy/" in name]
    assert len(steps) == 3 * 5
    assert all("gradients" in name for name in steps)


def test_a_users_arrays_are_not_written_to(strategy: MPIStrategy, rank: int) -> None:
    model, _ = both(strategy, rank)
    x, y = global_data(60)
    model.fit(((x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, 60, BATCH)), verbose=0)
    np.testing.assert_array_equal(y, global_data(60)[1], "TensorFlow has written to the user's arrays")


def test_compilation_is_switched_off_with_a_warning(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(jit_compile=True)
    with pytest.warns(UserWarning, match="jit_compile=True is switched off"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_a_model_outside_of_the_scope_is_warned_of(strategy: MPIStrategy, rank: int) -> None:
    model = compiled()
    with pytest.warns(UserWarning, match=r"built outside of strategy\.scope"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_a_model_outside_of_the_scope_may_be_evaluated(strategy: MPIStrategy, rank: int) -> None:
    model, (x, y) = compiled(), global_data(24)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.evaluate(x, y, verbose=0)
        model.predict(x, verbose=0)


def test_a_distributed_optimizer_is_refused(strategy: MPIStrategy, rank: int) -> None:
    with strategy.scope():
        model = compiled(optimizer=lambda: mpistrat.keras.DistributedOptimizer(sgd()))
    with pytest.raises(ValueError, match="would average gradients twice"):
        model.fit(*global_data(24), batch_size=BATCH, verbose=0)


def test_on_batch_takes_the_rows_of_a_rank(strategy: MPIStrategy, rank: int, size: int) -> None:
    model, reference = both(strategy, rank)
    x, y = global_data(4 * size)
    own = slice(4 * rank, 4 * rank + 4)
    for _ in range(2):
        assert_close(model.train_on_batch(x[own], y[own]), reference.train_on_batch(x, y), 1e-5)
    assert_close(model.test_on_batch(x[own], y[own]), reference.test_on_batch(x, y), 1e-5)
    assert_close([model.predict_on_batch(x[own])], [reference.predict_on_batch(x)], 1e-5)
    assert_equal_on_all_ranks(model.get_weights())


def test_a_callback_of_one_rank_sees_the_logs_of_all(strategy: MPIStrategy, rank: int) -> None:
    seen: list[float] = []
    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))]
    model, reference = both(strategy, rank)
    x, y = global_data(60)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks if rank == 0 else [])
    if rank == 0:
        ours = list(seen)
        seen.clear()
        reference.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        np.testing.assert_allclose(ours, seen, rtol=0, atol=1e-5)


@pytest.mark.parametrize("differs", [True, False])
def test_ranks_drop_different_units_unless_asked_otherwise(differs: bool, rank: int, size: int) -> None:
    strategy = MPIStrategy(random_per_rank=differs)
    with strategy.scope():
        layer = keras.layers.Dropout(0.5)
    kept = strategy.run(tf.function(lambda: layer(tf.ones([64]), training=True)))
    everybody = mpistrat.allgather_object(np.asarray(kept).tobytes())
    assert len(set(everybody)) == (size if differs else 1)


# Keras itself slices a matrix only if its rows are in order, with and without a strategy; the columns need not be.
@pytest.mark.parametrize(("way", "kind"), [("matrix", "csr_matrix"), ("matrix", "coo_array"),
                                           ("generator", "csr_matrix"), ("generator", "csc_matrix")])
def test_scipy_matrices(strategy: MPIStrategy, kind: str, way: str, rank: int) -> None:
    """Those that a single process learns from, whatever the order of their elements."""
    scipy_sparse = pytest.importorskip("scipy.sparse")
    x, y = global_data(60)
    x = np.where(x > 0.3, x, 0.0).astype(np.float32)

    def sparse(rows: np.ndarray, by_columns: bool) -> Any:
        row, column = np.nonzero(rows)
        order = np.lexsort([row, column] if by_columns else [-column, row])
        found = scipy_sparse.coo_matrix((rows[row, column][order], (row[order], column[order])), rows.shape)
        return getattr(scipy_sparse, kind)(found)

    batches = [(sparse(x[i:i + BATCH], True), y[i:i + BATCH]) for i in range(0, 60, BATCH)]

    def learned(scope: Any) -> list[np.ndarray]:
        with scope:
            model = keras.Sequential([keras.Input((x.shape[1],), sparse=True), keras.layers.Dense(3),
                                      keras.layers.Dense(1)])
            model.set_weights([np.full(w.shape, 0.1, np.float32) for w in model.get_weights()])
            model.compile(keras.optimizers.SGD(0.05), loss="mse")
        data = (sparse(x, False), y) if way == "matrix" else ((batch for batch in batches),)
        model.fit(*data, batch_size=BATCH if way == "matrix" else None, shuffle=False, verbose=0)
        return model.get_weights()

    assert_close(learned(strategy.scope()), learned(contextlib.nullcontext()), 1e-5)
