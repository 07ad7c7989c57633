"""Collectives that are under way have a queue each. tests/parallel/test_freed_graphs.py has what is left of them."""

from collections.abc import Iterator
from typing import Any

import pytest

import mpistrat

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from mpistrat.tensorflow.bridge.completion import COMPLETIONS  # noqa: E402


@pytest.fixture
def hvd() -> Iterator[Any]:
    import mpistrat.tensorflow as hvd
    hvd.init()
    yield hvd
    mpistrat.shutdown()


@pytest.mark.nightly
def test_as_many_collectives_under_way_as_there_were_numbers_of_queues(hvd: Any) -> None:
    """In one execution of one graph, each with a queue."""
    COMPLETIONS.prepare()
    count, queues = 400, len(COMPLETIONS._slots)

    @tf.function(autograph=False)
    def program(x: Any) -> list[Any]:
        return [hvd.allreduce(x * i, op=hvd.Sum, name=f"under_way_{i}") for i in range(count)]

    for _ in range(3):
        assert [float(y) for y in program(tf.constant(1.0))] == list(range(count))
    assert len(COMPLETIONS._slots) <= max(queues, count + 32)
    captures = program.get_concrete_function(tf.constant(1.0)).graph.captures
    assert sum(int(outside.shape.num_elements()) for outside, _ in captures if outside.dtype == tf.resource) <= 1
