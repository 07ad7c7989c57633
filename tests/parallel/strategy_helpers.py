"""What the tests of MPIStrategy share: a strategy, data, and comparisons among ranks and with one process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

import mpistrat
from mpistrat import runtime
from mpistrat.tensorflow import MPIStrategy

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def global_data(rows: int, columns: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The same rows on every rank: normal inputs and a smooth function of them."""
    generator = np.random.default_rng(11)
    x = generator.standard_normal((rows, columns)).astype(np.float32)
    return x, np.tanh(x @ generator.standard_normal((columns, 1))).astype(np.float32)


def assert_equal_on_all_ranks(arrays: Sequence[Any]) -> None:
    everybody = mpistrat.allgather_object([np.asarray(array).tobytes() for array in arrays])
    assert all(other == everybody[0] for other in everybody), "not the same bits on all ranks"


def assert_close(values: Sequence[Any], expected: Sequence[Any], atol: float) -> None:
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=atol)


@contextmanager
def collectives_counted() -> Iterator[list[str]]:
    """The names of the collectives that this rank submits meanwhile."""
    engine, names = runtime.current().engine, []
    submit, run = engine.submit, engine.run

    def counting(method: Callable) -> Callable:
        def counted(request: Any, *args: Any) -> Any:
            names.append(request.name)
            return method(request, *args)
        return counted

    engine.submit, engine.run = counting(submit), counting(run)
    try:
        yield names
    finally:
        del engine.submit, engine.run


def eagerly(function: Callable) -> Callable:
    return function


def in_graph(function: Callable) -> Callable:
    return tf.function(function)


def per_rank(strategy: MPIStrategy, values: Callable[[int], Any]) -> Any:
    """A distributed value: `values(rank)` on each rank."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values(context.replica_id_in_sync_group)))
