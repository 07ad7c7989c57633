"""What the tests that run on every rank share: two ways to execute, and what the ranks have in common."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from ..programs.features.common import assert_equal_on_all as assert_equal_on_all_ranks
from ..programs.features.common import of_all_processes as everywhere

__all__ = ["assert_equal_on_all_ranks", "both_ways", "eagerly", "everywhere", "in_graph"]


def eagerly(function: Callable) -> Callable:
    return function


def in_graph(function: Callable) -> Callable:
    return tf.function(function, autograph=False)


both_ways = pytest.mark.parametrize("way", [eagerly, in_graph], ids=["eager", "graph"])
