"""What the tests that run on every rank share: two ways to execute, and what the ranks have in common."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from ..programs.features.common import assert_equal_on_all as assert_equal_on_all_ranks
from ..programs.features.common import of_all_processes as everywhere
from ..support.levels import sample

__all__ = ["assert_equal_on_all_ranks", "both_ways", "eagerly", "either_way", "everywhere", "in_graph"]


def eagerly(function: Callable) -> Callable:
    return function


def in_graph(function: Callable) -> Callable:
    return tf.function(function, autograph=False)


WAYS = {"eager": eagerly, "graph": in_graph}
both_ways = pytest.mark.parametrize("way", list(WAYS.values()), ids=list(WAYS))
either_way = sample("way", list(WAYS.values()), ids=list(WAYS))  # Where other tests of the first level show both.
