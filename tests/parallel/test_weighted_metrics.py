"""MetricAverageCallback(weighted=True): the metrics of ranks with different numbers of rows are those of all rows."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as hvd
from mpistrat.keras.bridge.measures import rows_of

from ..support.levels import sample

STEPS, COLUMNS = 3, 4


def rows_of_rank(rank: int, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one rank; for each rank as many batches of `batch_of(rank)` rows, the last of them shorter."""
    generator = np.random.default_rng(100 * offset + rank)
    x = generator.standard_normal((batch_of(rank) * STEPS - 1 - rank - offset, COLUMNS)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) * (1 + rank)).astype(np.float32)


def batch_of(rank: int) -> int:
    return 4 + 3 * rank


def all_rows(size: int, offset: int = 0) -> tuple[np.ndarray, np.ndarray]:
    parts = [rows_of_rank(rank, offset) for rank in range(size)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def new_model(cls: Any = keras.Sequential, is_distributed: bool = True, **arguments: Any) -> Any:
    """A model that training does not change, so that one process has its metrics too."""
    keras.utils.set_random_seed(7)
    inputs = keras.Input((COLUMNS,))
    model = cls(inputs, keras.layers.Dense(1)(inputs)) if cls is not keras.Sequential else \
        cls([inputs, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.0)
    model.compile(hvd.DistributedOptimizer(optimizer) if is_distributed else optimizer, "mse", metrics=["mae"],
                  **arguments)
    return model


def fit(model: Any, rank: int, callbacks: Any = (), epochs: int = 2, **arguments: Any) -> dict[str, list[float]]:
    x, y = rows_of_rank(rank)
    return model.fit(x, y, batch_size=batch_of(rank), epochs=epochs, verbose=0, callbacks=[
        *callbacks, hvd.callbacks.MetricAverageCallback(weighted=True)], **arguments).history


def expected(size: int) -> dict[str, float]:
    """The metrics of one process over the rows of all ranks, from the predictions."""
    found = {}
    for prefix, offset in (("", 0), ("val_", 1)):
        x, y = all_rows(size, offset)
        error = new_model().predict(x, verbose=0).astype(np.float64) - y
        found |= {f"{prefix}loss": float(np.mean(error ** 2)), f"{prefix}mae": float(np.mean(abs(error)))}
    return found


def assert_means(history: dict[str, list[float]], size: int, names: tuple[str, ...]) -> None:
    means = expected(size)
    for name in names:
        assert history[name] == pytest.approx([means[name]] * len(history[name]), rel=1e-5), name
    assert len(set(mpistrat.allgather_object(str({name: history[name] for name in names})))) == 1


ALL = ("loss", "mae", "val_loss", "val_mae")


@pytest.mark.horovod("metric-average")
@sample("arguments", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_the_metrics_are_those_of_one_process_over_all_rows(rank: int, size: int, arguments: dict) -> None:
    history = fit(new_model(**arguments), rank, validation_data=rows_of_rank(rank, 1),
                  validation_batch_size=batch_of(rank))
    assert_means(history, size, ALL)


def test_rows_of_a_dataset_without_a_known_length_are_counted(rank: int, size: int) -> None:
    def batches() -> Any:
        x, y = rows_of_rank(rank)
        for start in range(0, len(x), batch_of(rank)):
            yield x[start:start + batch_of(rank)], y[start:start + batch_of(rank)]

    signature = tuple(tf.TensorSpec((None, columns), tf.float32) for columns in (COLUMNS, 1))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature).prefetch(3)
    history = new_model().fit(data, epochs=2, verbose=0, callbacks=[
        hvd.callbacks.MetricAverageCallback(weighted=True)]).history
    assert_means(history, size, ("loss", "mae"))


@pytest.mark.nightly
def test_an_optimizer_that_is_not_distributed_and_a_second_fit(rank: int, size: int) -> None:
    model = new_model(is_distributed=False)
    fit(model, rank, epochs=1)
    function = model.train_function
    assert_means(fit(model, rank, validation_data=rows_of_rank(rank, 1)), size, ALL)
    assert model.train_function is function, "the second fit must not trace again"
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    assert_means(fit(model, rank), size, ("loss", "mae"))


def test_what_a_callback_evaluates_does_not_count(rank: int, size: int) -> None:
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.evaluate(np.ones((5 * (rank + 1), COLUMNS)), np.ones((5 * (rank + 1), 1)), verbose=0)

    history = fit(new_model(), rank, [Evaluates()], validation_data=rows_of_rank(rank, 1), validation_freq=2)
    assert_means(history, size, ALL)


@sample("weighted", [False, True])
def test_validation_on_one_rank_only_is_a_warning_and_the_epoch_goes_on(weighted: bool, rank: int, size: int,
                                                                        caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = new_model(), rows_of_rank(rank)
    validation = rows_of_rank(size, offset=1) if rank == 0 else None
    history = model.fit(x, y, batch_size=batch_of(rank), epochs=2, verbose=0, validation_data=validation, callbacks=[
        hvd.callbacks.MetricAverageCallback(weighted=weighted)]).history
    assert len(set(mpistrat.allgather_object(str([history["loss"], history["mae"]])))) == 1
    assert ("val_loss" in history) == (rank == 0)
    if rank == 0:
        assert history["val_loss"] == pytest.approx([model.evaluate(*validation, verbose=0)[0]] * 2)
    texts = [record.getMessage() for record in caplog.records if "only some ranks" in record.getMessage()]
    expected_text = "val_loss on ranks [0]; val_mae on ranks [0]. Callbacks that read these metrics may"
    assert len(texts) == (1 if rank == 0 and size > 1 else 0) and all(expected_text in text for text in texts)


def test_a_step_of_the_users_own_is_counted(rank: int, size: int) -> None:
    class Own(keras.Model):
        def train_step(self, data: Any) -> dict:
            x, y = data
            return self.compute_metrics(x, y, self(x, training=True))

    assert_means(fit(new_model(Own), rank), size, ("mae",))


def test_batches_that_the_step_does_not_get_are_an_error_on_every_rank(rank: int, size: int) -> None:
    if size == 1:
        pytest.skip("one rank averages nothing")

    class Bypasses(keras.Model):
        def make_train_function(self, force: bool = False) -> None:
            def function(iterator: Any) -> dict:
                return keras.Model.train_step(self, next(iterator))

            super().make_train_function(force)
            if mpistrat.rank() == 1:
                self.train_function = function

    with pytest.raises(ValueError, match=r"^loss cannot be weighted by rows\. On ranks \[1\] the number of rows is "
                                         r"unknown, because batches did not go through the model's train_step"):
        fit(new_model(Bypasses, is_distributed=False), rank, steps_per_epoch=1)


def test_a_batch_of_scalars_has_no_rows() -> None:
    assert rows_of((tf.constant(1.0), None, tf.constant(2))) is None


@pytest.mark.parametrize("batch", [
    tf.ragged.constant([[1], [], [2, 3]]), tf.sparse.from_dense([[0.0], [1.0], [0.0]]),
    {"a": tf.zeros((3, 2)), "b": tf.zeros((3,))}, (None, tf.zeros((3, 2))), (tf.constant(1.0), tf.zeros((3, 2)))],
    ids=["ragged", "sparse", "dictionary", "none", "scalar"])
def test_the_rows_of_other_batches(batch: Any) -> None:
    assert int(rows_of((batch, tf.zeros(3)))) == 3
