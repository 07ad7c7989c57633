"""What the tests of MPIStrategy share: a strategy, data, and comparisons among ranks and with one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from mpistrat.api import runtime
from mpistrat.tensorflow import MPIStrategy

from ..programs.features.common import assert_close, in_replica
from ..programs.features.common import points as global_data
from .helpers import assert_equal_on_all_ranks, eagerly

__all__ = ["MEAN", "SUM", "assert_close", "assert_equal_on_all_ranks", "collectives_counted", "eagerly", "global_data",
           "in_graph", "in_replica", "per_rank"]
SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


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


def in_graph(function: Callable) -> Callable:
    return tf.function(function)


def per_rank(strategy: MPIStrategy, values: Callable[[int], Any]) -> Any:
    """A distributed value: `values(rank)` on each rank."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(values(context.replica_id_in_sync_group)))
