"""The destructor of a tf.data iterator may wait for a minute: another thread calls it while there are other ranks."""

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import tensorflow as tf

import mpistrat.tensorflow as hvd
from mpistrat.tensorflow import iterator_ends

LIMIT_S = 60.0


def test_another_thread_destroys_an_iterator() -> None:
    iterator = iter(tf.data.Dataset.range(3))
    assert int(next(iterator)) == 0
    destroyed, threads = threading.Event(), []

    def note() -> None:
        threads.append(threading.get_ident())
        destroyed.set()

    weakref.finalize(iterator._iterator_resource, note)
    del iterator
    assert destroyed.wait(LIMIT_S)
    assert (threads != [threading.get_ident()]) == (hvd.size() > 1)


def test_the_garbage_collector_leaves_an_iterator_to_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    started: list[Callable[[], None]] = []
    monkeypatch.setattr(iterator_ends._thread, "start_new_thread", lambda run, _: started.append(run))
    iterator = iter(tf.data.Dataset.range(3))
    iterator.itself = iterator
    del iterator
    gc.collect()
    assert len(started) == (hvd.size() > 1)
    for run in started:
        run()


def test_a_process_without_a_further_thread_destroys_iterators_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Callable[[], None], arguments: tuple) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(iterator_ends._thread, "start_new_thread", refuse)
    iterator = iter(tf.data.Dataset.range(3))
    resource = weakref.ref(iterator._iterator_resource)
    del iterator
    assert resource() is None


def test_an_iterator_in_a_graph_ends_with_the_call() -> None:
    @tf.function
    def total(dataset: tf.data.Dataset) -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for value in dataset:
            found += value
        return found

    assert int(total(tf.data.Dataset.range(4))) == 6
    assert int(total(tf.data.Dataset.range(4))) == 6
