"""Threads of one rank that use MPIStrategy: each meets the same one of the other ranks, in whichever order they run."""

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mpistrat.api import runtime
from mpistrat.core.errors import CollectiveError, InvalidRequestError
from mpistrat.tensorflow import MPIStrategy

from .strategy_helpers import SUM, per_rank

LIMIT_S = 60
ON_READ = tf.VariableSynchronization.ON_READ


def counter(strategy: MPIStrategy, value: float) -> Any:
    """A variable like those of metrics, which is `value` on each rank, and the sum of those when it is read."""
    with strategy.scope():
        variable = tf.Variable(0.0, synchronization=ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False)
    strategy.run(lambda: variable.assign(value))
    return variable


@contextmanager
def submitted_in_order(*threads: threading.Thread) -> Iterator[None]:
    """Within it, the first eager reduction of each thread is submitted after those of the threads before it."""
    engine = runtime.current().engine
    run, done = engine.run, {thread: threading.Event() for thread in threads}

    def ordered(request: Any, arrays: Any, *limit: Any) -> Any:
        thread = threading.current_thread()
        if thread not in done or not request.name.endswith("reduce"):
            return run(request, arrays, *limit)
        for earlier in threads[:threads.index(thread)]:
            assert done[earlier].wait(LIMIT_S), f"{earlier.name} submits nothing"
        try:
            return engine.submit(request, arrays)
        finally:
            done[thread].set()

    engine.run = ordered
    try:
        yield
    finally:
        del engine.run


def in_other_orders(rank: int, threads: list[threading.Thread]) -> list[threading.Thread]:
    """The threads in an order that is another one on each of two successive ranks."""
    first = rank % len(threads)
    return threads[first:] + threads[:first]


def outcome(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except Exception as error:
        return error


def outcomes(rank: int, actions: dict[str | None, Callable[[], Any]], in_main: Callable[[], Any] | None = None
             ) -> list[Any]:
    """What each of `actions` returns, or the error that it raises, each called in a thread of its own.

    They have the names of the threads; one that begins with "Thread" leaves it to Python. `in_main` comes last.
    """
    results: list[Any] = [None] * len(actions)
    together = threading.Barrier(len(actions) + bool(in_main))

    def read(index: int, action: Callable[[], Any]) -> None:
        together.wait(LIMIT_S)
        results[index] = outcome(action)
        together.wait(LIMIT_S)

    threads = [threading.Thread(target=read, args=(i, action), name=None if str(name).startswith("Thread") else name)
               for i, (name, action) in enumerate(actions.items())]
    everybody = [*threads, threading.current_thread()] if in_main else threads
    with submitted_in_order(*in_other_orders(rank, everybody)):
        for thread in threads:
            thread.start()
        if in_main:
            together.wait(LIMIT_S)
            results.append(outcome(in_main))
            together.wait(LIMIT_S)
        for thread in threads:
            thread.join(LIMIT_S)
    return results


# -- threads of the user ----------------------------------------------------------------------------------------------


def test_threads_with_names_read_in_any_order(strategy: MPIStrategy, rank: int, size: int) -> None:
    variables = {name: counter(strategy, value) for name, value in (("ones", 1.0), ("tens", 10.0), ("hundreds", 100.0))}
    for _ in range(20):
        got = outcomes(rank, {name: variable.numpy for name, variable in variables.items()})
        assert got == [1.0 * size, 10.0 * size, 100.0 * size]


@pytest.mark.parametrize("kind", ["reduce", "gather", "broadcast"])
def test_all_collectives_of_a_thread_are_its_own(strategy: MPIStrategy, kind: str, rank: int, size: int) -> None:
    def collective(value: float) -> Any:
        local = per_rank(strategy, lambda r: np.array([value + r], np.float32))
        if kind == "reduce":
            return strategy.reduce(SUM, local, axis=None).numpy().tolist()
        if kind == "gather":
            return strategy.gather(local, 0).numpy().tolist()
        return strategy.extended._broadcast_to(strategy.extended.local(local), None).numpy().tolist()

    expected = {"reduce": lambda value: [sum(value + r for r in range(size))],
                "gather": lambda value: [value + r for r in range(size)], "broadcast": lambda value: [value]}[kind]
    got = outcomes(rank, {"evaluation": lambda: [collective(100.0 * i) for i in range(20)]},
                   in_main=lambda: [collective(100.0 * i + 50) for i in range(20)])
    assert got == [[expected(100.0 * i) for i in range(20)], [expected(100.0 * i + 50) for i in range(20)]]


def test_two_threads_that_the_ranks_cannot_tell_apart_are_refused(strategy: MPIStrategy, rank: int, size: int,
                                                                  restart: Callable[[], None]) -> None:
    ones, hundreds = counter(strategy, 1.0), counter(strategy, 100.0)
    got = outcomes(rank, {"Thread a": ones.numpy, "Thread b": hundreds.numpy})
    assert [type(error) for error in got] == [InvalidRequestError] * 2
    for error in got:
        assert re.match(r"the threads 'Thread-\d+ \(read\)' and 'Thread-\d+ \(read\)' .*name=", str(error))
    restart()
    assert outcomes(rank, {"Thread": ones.numpy}) == [1.0 * size]


# -- asynchronous checkpoints -----------------------------------------------------------------------------------------


@pytest.fixture
def asynchronous() -> Any:
    """Options, new ones each time: TensorFlow adds to the list of callbacks in those that it is given."""
    return tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)


def saved(path: str, **like: Any) -> dict[str, np.ndarray]:
    """What a checkpoint holds, read into variables without a strategy that are shaped like those given."""
    variables = {name: tf.Variable(tf.zeros_like(value)) for name, value in like.items()}
    tf.train.Checkpoint(**variables).read(path).expect_partial()
    return {name: variable.numpy() for name, variable in variables.items()}


def test_a_read_does_not_meet_what_another_rank_saves(strategy: MPIStrategy, rank: int, size: int, shared_dir: str,
                                                      asynchronous: Any) -> None:
    ones, hundreds = counter(strategy, 1.0), counter(strategy, 100.0)
    checkpoint = tf.train.Checkpoint(ones=ones)
    engine, main, reading = runtime.current().engine, threading.current_thread(), threading.Event()
    run = engine.run

    def after_main(request: Any, arrays: Any, *limit: Any) -> Any:
        """What is reduced in other threads comes after the first read of the main one."""
        if not request.name.endswith("/reduce"):
            return run(request, arrays, *limit)
        if threading.current_thread() is main:
            handle = engine.submit(request, arrays)
            reading.set()
            return handle
        assert reading.wait(LIMIT_S)
        return engine.submit(request, arrays)

    path = checkpoint.save(os.path.join(shared_dir, "first"), asynchronous)
    if rank == 0:  # It reads first, and then saves; the others save first.
        engine.run = after_main
        try:
            assert float(hundreds) == 100.0 * size
        finally:
            del engine.run
    checkpoint.sync()
    if rank != 0:
        assert float(hundreds) == 100.0 * size
    assert saved(path, ones=0.0) == {"ones": 1.0 * size}


def test_several_checkpoints_are_written_at_the_same_time(strategy: MPIStrategy, size: int, shared_dir: str) -> None:
    count, new_options = counter(strategy, 0.0), functools.partial(
        tf.train.CheckpointOptions, experimental_enable_async_checkpoint=True)
    first, second, third = (tf.train.Checkpoint(count=count) for _ in range(3))
    manager = tf.train.CheckpointManager(third, f"{shared_dir}/managed", max_to_keep=None)
    expected = {}
    for number in range(4):
        ways: list[Callable[[], str]] = [
            lambda: first.save(f"{shared_dir}/saved", new_options()),
            lambda number=number: second.write(f"{shared_dir}/written{number}", new_options()),
            lambda: manager.save(options=new_options())]
        for save in ways:
            strategy.run(lambda: count.assign_add(1.0))
            expected[save()] = float(count)
    for checkpoint in (first, second, third):
        checkpoint.sync()
    assert list(expected.values()) == [1.0 * size * (i + 1) for i in range(12)]
    assert [saved(path, count=0.0)["count"] for path in expected] == list(expected.values())
    assert manager.checkpoints == list(expected)[2::3] and manager.latest_checkpoint == list(expected)[-1]


def test_what_goes_wrong_while_writing_is_an_error_of_the_next_save_on_every_rank(
        strategy: MPIStrategy, size: int, shared_dir: str, asynchronous: Any) -> None:
    checkpoint = tf.train.Checkpoint(count=counter(strategy, 1.0))
    Path(shared_dir, "file").write_text("")
    checkpoint.save(os.path.join(shared_dir, "file", "below"), asynchronous)
    good = os.path.join(shared_dir, "good")
    with pytest.raises((tf.errors.OpError, CollectiveError), match="file is not a directory"):
        checkpoint.save(good, asynchronous)
    path = checkpoint.save(good, asynchronous)
    checkpoint.sync()
    assert saved(path, count=0.0) == {"count": 1.0 * size}
