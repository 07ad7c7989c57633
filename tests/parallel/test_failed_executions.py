"""A tf.function ends in an error that the script catches: no collective of it meets one of a later step."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd

NOT_ALL = "disagree on how many executions of the tf.function have ended in an error"
WAY_OUT = "To go on in the same process, call shutdown\\(\\) and init\\(\\) on every rank"


def total(value: Any, name: str) -> Any:
    return hvd.allreduce(value, op=hvd.Sum, name=name)


def late(x: Any) -> Any:
    return 0.0 * tf.while_loop(lambda i, h: i < 100, lambda i, h: (i + 1, tf.tanh(h @ h)),
                               (tf.constant(0), tf.fill([300, 300], x)))[1][0, 0]


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["function", "nested", "branch"])
def test_a_collective_that_one_rank_has_left_behind_ends_the_engines(where: str, rank: int, size: int,
                                                                    restart: Callable[[], None]) -> None:
    """The last rank submits the second collective before the error comes, and the others do not."""
    is_last = rank == size - 1

    def inner(x: Any) -> Any:
        return total(x, "second")

    def second(x: Any) -> Any:
        if where == "branch":
            return tf.cond(x > -1.0, lambda: inner(x), lambda: x)
        return tf.function(inner, autograph=False)(x) if where == "nested" else inner(x)

    @tf.function(autograph=False)
    def step(x: Any, diagonal: Any) -> Any:
        first = total(x, "first")
        inverse = tf.linalg.inv(tf.eye(3) * diagonal + (late(first) if is_last else 0.0) + 0.0 * first)[0, 0]
        return second(x) + 0.0 * inverse if is_last else second(x + 0.0 * inverse)

    assert step(tf.constant(1.0), tf.constant(1.0)) == size
    # Before it reaches the second collective, or while it waits for that.
    with pytest.raises(tf.errors.OpError, match="not invertible"):
        step(tf.constant(2.0), tf.constant(0.0))
    with pytest.raises(tf.errors.OpError, match=f"second: on rank {size - 1} the tf.function that has submitted this "
                                                "operation ended in an error before the operation was complete"
                                                rf"\. .*{WAY_OUT}"):
        for number in range(3, 6):
            assert step(tf.constant(float(number)), tf.constant(1.0)) == number * size
    restart()
    assert step(tf.constant(7.0), tf.constant(1.0)) == 7 * size


@pytest.mark.parametrize("steps", [0, 20])
def test_the_first_collective_does_not_meet_one_of_a_step_that_has_failed(steps: int, rank: int, size: int,
                                                                         restart: Callable[[], None]) -> None:
    """The last rank fails late, after the submit. After some steps the ranks vote instead of negotiating."""
    is_last = rank == size - 1

    @tf.function(autograph=False)
    def step(x: Any, diagonal: Any) -> Any:
        inverse = tf.linalg.inv(tf.eye(3) * diagonal + (late(x) if is_last else 0.0))[0, 0]
        return total(x if is_last else x + 0.0 * inverse, "only") + 0.0 * inverse

    for number in range(steps):
        assert step(tf.constant(float(number)), tf.constant(1.0)) == number * size
    with pytest.raises(tf.errors.OpError, match=f"not invertible|{NOT_ALL}" if is_last else "not invertible"):
        step(tf.constant(100.0), tf.constant(0.0))
    with pytest.raises(tf.errors.OpError, match=f"only: (the ranks {NOT_ALL}|.* was complete)"):
        for number in range(101, 104):
            assert step(tf.constant(float(number)), tf.constant(1.0)) == number * size
    restart()
    assert step(tf.constant(7.0), tf.constant(1.0)) == 7 * size


def test_a_loop_does_not_meet_an_iteration_of_one_that_has_failed(rank: int, size: int,
                                                                  restart: Callable[[], None]) -> None:
    """The last rank submits in one iteration more than the others before it fails."""
    is_last = rank == size - 1

    @tf.function(autograph=False)
    def step(x: Any, fails: Any) -> Any:
        def body(i: Any, y: Any) -> tuple[Any, Any]:
            singular = tf.where(fails & (i == 2), 0.0, 1.0)
            inverse = tf.linalg.inv(tf.eye(3) * singular + (late(y) if is_last else 0.0))[0, 0]
            return i + 1, total(y if is_last else y + 0.0 * inverse, "each") / size + 0.0 * inverse
        return tf.while_loop(lambda i, _: i < 4, body, (tf.constant(0), x))[1]

    for number in range(3):
        assert step(tf.constant(float(number)), tf.constant(False)) == number
    with pytest.raises(tf.errors.OpError, match=f"not invertible|{NOT_ALL}" if is_last else "not invertible"):
        step(tf.constant(100.0), tf.constant(True))
    with pytest.raises(tf.errors.OpError, match=f"each: (the ranks {NOT_ALL}|.* was complete)"):
        for number in range(101, 104):
            assert step(tf.constant(float(number)), tf.constant(False)) == number
    restart()


def test_a_step_that_one_rank_alone_has_given_up_ends_the_engines(rank: int, size: int,
                                                                 restart: Callable[[], None]) -> None:
    @tf.function(autograph=False)
    def step(x: Any, diagonal: Any) -> Any:
        return total(x + 0.0 * tf.linalg.inv(tf.eye(3) * diagonal)[0, 0], "alone")

    with pytest.raises(tf.errors.OpError, match=rf"alone: the ranks {NOT_ALL}: 1 on ranks \[0\]; 0 on ranks .*A script "
                                                r"may catch an error only if all ranks have the error in the same "
                                                r"execution\."):
        for number in range(5):
            if number == 2 and rank == 0:
                with suppress(tf.errors.InvalidArgumentError):
                    step(tf.constant(2.0), tf.constant(0.0))
            else:
                assert step(tf.constant(float(number)), tf.constant(1.0)) == number * size
    with pytest.raises(tf.errors.OpError, match=WAY_OUT):
        step(tf.constant(0.0), tf.constant(1.0))
    restart()


def test_after_a_join_the_ranks_may_have_failed_in_other_steps(rank: int, size: int) -> None:
    """The data of each rank ends in another step."""
    def epoch() -> None:
        data = iter(tf.data.Dataset.range(2 + rank))
        while True:
            try:
                step(next(data) if rank % 2 else data)
            except (tf.errors.OutOfRangeError, StopIteration):
                break
        hvd.join()

    @tf.function(autograph=False, reduce_retracing=True)
    def step(x: Any) -> Any:
        return total(tf.cast(next(x) if hasattr(x, "get_next") else x, tf.float32), "of data")

    for _ in range(3):
        epoch()
        assert step(tf.constant(1, tf.int64)) == size


def test_a_step_that_is_ahead_does_not_meet_one_that_has_yet_to_fail(rank: int, size: int,
                                                                    restart: Callable[[], None]) -> None:
    """The error comes late on the last rank, when the others may have submitted the next step's collective."""
    is_last = rank == size - 1

    @tf.function(autograph=False)
    def step(x: Any, diagonal: Any) -> Any:
        first = total(x, "ahead")
        inverse = tf.linalg.inv(tf.eye(3) * diagonal + (late(x) if is_last else 0.0))[0, 0]
        second = total(x if is_last else x + 0.0 * inverse, "behind")
        return first + second + 0.0 * inverse

    errors = 0
    for number in range(1, 6):
        try:
            assert step(tf.constant(float(number)), tf.constant(0.0 if number == 2 else 1.0)) == 2 * number * size
        except tf.errors.OpError:
            errors += 1
    assert errors >= 1
    restart()


@pytest.mark.parametrize("kind", ["assert", "end of data", "inverse"])
def test_after_an_error_without_a_collective_in_flight_training_goes_on(kind: str, rank: int, size: int) -> None:
    data = iter(tf.data.Dataset.range(100 if kind != "end of data" else 3))

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        first = total(x + 0.0 * tf.cast(next(data), tf.float32), "first")
        if kind == "assert":
            tf.debugging.assert_none_equal(first, 3.0 * size)
        inverse = tf.linalg.inv(tf.eye(2) * (first - 3.0 * size)) if kind == "inverse" else tf.zeros([2, 2])
        return total(first / size + inverse[0, 1], "second")

    for number in range(6):
        fails = number == 3 or (kind == "end of data" and number > 3)
        try:
            assert step(tf.constant(float(number))) == number * size
            assert not fails
        except tf.errors.OpError:
            assert fails
    assert mpistrat.allreduce(1.0, op=mpistrat.Sum) == size


def test_a_graph_that_cannot_submit_ends_the_engines(rank: int, size: int, restart: Callable[[], None]) -> None:
    if rank == 0:
        mpistrat.allreduce_async(np.ones(1), name="twice")
    with pytest.raises(tf.errors.OpError, match=f"twice: requested to reduce.* in a tf.function on rank 0.*{WAY_OUT}"):
        tf.function(lambda: total(tf.ones([1]), "another" if rank else "twice"), autograph=False)()
    restart()
    assert mpistrat.allreduce(1.0, op=mpistrat.Sum) == size
