"""What the tests that run on every rank share: two ways to execute, and what the ranks have in common."""

import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from ..programs.features.common import assert_close
from ..programs.features.common import assert_equal_on_all as assert_equal_on_all_ranks
from ..programs.features.common import of_all_processes as everywhere
from ..support.levels import sample

__all__ = ["TrainingInterruptedError", "assert_close", "assert_equal_on_all_ranks", "both_ways", "eagerly",
           "either_way", "everywhere", "in_graph", "loaded_again", "values_of"]


class TrainingInterruptedError(Exception):
    """Ends a training."""


def eagerly(function: Callable) -> Callable:
    return function


def in_graph(function: Callable) -> Callable:
    return tf.function(function, autograph=False)


def values_of(variables: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(variable.numpy()) for variable in variables]


def loaded_again(model: Any, **arguments: Any) -> Any:
    import mpistrat.keras as hvd
    with tempfile.TemporaryDirectory() as folder:
        model.save(path := os.path.join(folder, "model.keras"))
        return hvd.load_model(path, **arguments)


WAYS = {"eager": eagerly, "graph": in_graph}
both_ways = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
either_way = sample("way", list(WAYS.values()), ids=list(WAYS))  # Where other tests of the first level show both.
