"""Nothing is left of traced functions with collectives that are no more: no graph, no call site, no queue."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import mpistrat

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from mpistrat.tensorflow.bridge import cpu, python_op  # noqa: E402
from mpistrat.tensorflow.bridge.completion import COMPLETIONS  # noqa: E402

FUNCTIONS = 300


@pytest.fixture
def hvd() -> Iterator[Any]:
    import mpistrat.tensorflow as hvd
    hvd.init()
    yield hvd
    mpistrat.shutdown()


def live_call_sites() -> int:
    gc.collect()
    return sum(isinstance(thing, cpu._CpuCallSite) for thing in gc.get_objects())


def live_functions() -> int:
    return sum(map(len, python_op._called.values()))


def captured(graph: Any) -> int:
    """How many handles of resources a graph captures."""
    return sum(int(outside.shape.num_elements()) for outside, _ in graph.captures if outside.dtype == tf.resource)


@pytest.mark.nightly
def test_hundreds_of_functions(hvd: Any) -> None:
    x, graphs, kept = tf.ones([3]), [], []
    COMPLETIONS.prepare()
    before, functions_before, queues = live_call_sites(), live_functions(), len(COMPLETIONS._slots)
    for number in range(FUNCTIONS):
        function = tf.function(lambda x: hvd.allreduce(x), autograph=False)
        function(x)
        graph = function.get_concrete_function(x).graph
        graphs.append(weakref.ref(graph))
        assert captured(graph) <= 1
        if number % 100 == 0:
            kept.append(function)
    del function, graph
    assert live_call_sites() - before == len(kept)
    assert sum(graph() is not None for graph in graphs) == len(kept)
    assert len(COMPLETIONS._slots) == queues
    assert live_functions() - functions_before <= 4 * len(kept)
    for function in kept:
        assert function(x).numpy().tolist() == [1.0] * 3
    del function
    kept.clear()
    assert live_call_sites() == before


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
    assert captured(program.get_concrete_function(tf.constant(1.0)).graph) <= 1
