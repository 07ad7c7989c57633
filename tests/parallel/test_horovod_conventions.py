"""Horovod's conventions for names, errors and dtypes that hold for every collective on tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.core.handle import Entry

from ..support.levels import sample
from .helpers import in_graph

# Each takes a tensor with as many rows as there are ranks, and a process set.
COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "allreduce": lambda x, s: hvd.allreduce(x, process_set=s),
    "grouped_allreduce": lambda x, s: hvd.grouped_allreduce([x], process_set=s),
    "allgather": lambda x, s: hvd.allgather(x, process_set=s),
    "grouped_allgather": lambda x, s: hvd.grouped_allgather([x], process_set=s),
    "broadcast": lambda x, s: hvd.broadcast(x, 0, process_set=s),
    "broadcast_": lambda x, s: hvd.broadcast_([tf.Variable(x)], 0, process_set=s),
    "broadcast_variables": lambda x, s: hvd.broadcast_variables([tf.Variable(x)], 0, process_set=s),
    "alltoall": lambda x, s: hvd.alltoall(x, process_set=s),
    "reducescatter": lambda x, s: hvd.reducescatter(x, process_set=s),
    "grouped_reducescatter": lambda x, s: hvd.grouped_reducescatter([x], process_set=s),
}
each_collective = pytest.mark.parametrize("collective", COLLECTIVES)
one_collective = sample("collective", COLLECTIVES)  # mpistrat begins anew for each.


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("names-graph", "ignore-name-scope")
def test_in_a_graph_the_name_is_that_of_the_function_and_the_operation(submitted: list[Entry]) -> None:
    @in_graph
    def step(x: Any) -> Any:
        with tf.name_scope("outer"):
            y = tf.identity(x, name="grad-of.x")
            return (hvd.allreduce(y), hvd.allreduce(2 * y), hvd.broadcast(y, 0), hvd.allreduce(y, name="my/own:0"),
                    hvd.broadcast(y, 0, name="root", ignore_name_scope=True))

    step(tf.ones([2]))
    assert [entry.request.name for entry in submitted] == [
        "step()/allreduce", "step()/allreduce_1", "step()/broadcast", "outer/my_own_0", "root"]


@pytest.mark.horovod("names-eager")
def test_an_eager_collective_has_the_name_of_its_operation(submitted: list[Entry]) -> None:
    for name, collective in COLLECTIVES.items():
        collective(tf.ones([mpistrat.size()]), hvd.global_process_set)
        assert submitted.pop().request.name == ("broadcast_variables" if name == "broadcast_" else name)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("not-initialized")
@one_collective
def test_before_init_a_collective_is_a_failed_precondition(collective: str, size: int) -> None:
    x, variable = tf.ones([size]), tf.Variable(tf.ones([size]))

    def step() -> Any:
        if collective.startswith("broadcast_"):
            return hvd.broadcast_([variable], 0)
        return COLLECTIVES[collective](x, hvd.global_process_set)

    traced, untraced = in_graph(step), in_graph(step)
    traced()
    mpistrat.shutdown()
    try:
        for call in (step, step, untraced):
            with pytest.raises(tf.errors.FailedPreconditionError, match=r"has not been initialized; use hvd\.init"):
                call()
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"has not been initialized; use hvd\.init"):
            traced()
    finally:
        mpistrat.init()


@pytest.mark.horovod("after-shutdown")
@one_collective
def test_when_a_rank_has_shut_down_the_collectives_of_others_are_unknown_errors(collective: str, rank: int,
                                                                                size: int) -> None:
    try:
        if rank == size - 1:
            mpistrat.shutdown()
            return
        for _ in range(2):
            with pytest.raises(tf.errors.UnknownError, match="have already shut down") as raised:
                COLLECTIVES[collective](tf.ones([size]), hvd.global_process_set)
            assert isinstance(raised.value, mpistrat.ShutdownError)
    finally:
        mpistrat.shutdown()
        mpistrat.init()


@pytest.mark.horovod("not-a-member")
@each_collective
def test_a_set_without_this_rank_is_an_invalid_argument(collective: str, rank: int, size: int) -> None:
    process_set = hvd.add_process_set([0])
    if rank != 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="this rank is not a member of the provided process "
                                                                 r"set, whose ranks are \[0\]"):
            COLLECTIVES[collective](tf.ones([size]), process_set)
    hvd.remove_process_set(process_set)


@pytest.mark.horovod("unknown-set")
@each_collective
def test_a_set_that_is_not_registered_is_an_invalid_argument(collective: str, size: int) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not exist or has not been registered"):
        COLLECTIVES[collective](tf.ones([size]), hvd.ProcessSet([0]))


def one_row(dtype: Any = tf.float32, columns: int = 2) -> Any:
    return tf.ones([mpistrat.size(), columns], dtype)


# What the last rank and all other ranks do, and the first difference that is told. Each also differs in all aspects
# that are told later.
ORDER: list[tuple[str, Callable, Callable]] = [
    ("dtype", lambda: hvd.allgather(one_row(tf.float64, 3), name="odd"),
     lambda: hvd.allreduce(one_row(), name="odd")),
    ("kind of collective", lambda: hvd.allgather(one_row(columns=3), name="odd"),
     lambda: hvd.allreduce(one_row(), name="odd")),
    ("shape", lambda: hvd.allreduce(one_row(columns=3), op=hvd.Min, prescale_factor=2.0, name="odd"),
     lambda: hvd.allreduce(one_row(), name="odd")),
    ("prescale and postscale factors", lambda: hvd.allreduce(one_row(), op=hvd.Min, prescale_factor=2.0, name="odd"),
     lambda: hvd.allreduce(one_row(), name="odd")),
    ("reduce operation", lambda: hvd.allreduce(one_row(), op=hvd.Min, name="odd"),
     lambda: hvd.allreduce(one_row(), name="odd")),
    ("dtype", lambda: hvd.allreduce(one_row(tf.float64), op=hvd.Adasum, name="odd"),
     lambda: hvd.allreduce(one_row(), op=hvd.Sum, name="odd")),
    ("dtype", lambda: hvd.reducescatter(one_row(tf.float64, 3), op=hvd.Sum, prescale_factor=2.0, name="odd"),
     lambda: hvd.reducescatter(one_row(), name="odd")),
    ("shape", lambda: hvd.reducescatter(one_row(columns=3), op=hvd.Sum, prescale_factor=2.0, name="odd"),
     lambda: hvd.reducescatter(one_row(), name="odd")),
    ("prescale and postscale factors", lambda: hvd.reducescatter(one_row(), op=hvd.Sum, prescale_factor=2.0,
                                                                 name="odd"),
     lambda: hvd.reducescatter(one_row(), name="odd")),
    ("dtype", lambda: hvd.allgather(one_row(tf.float64, 3), name="odd"), lambda: hvd.allgather(one_row(), name="odd")),
    ("shape", lambda: hvd.allgather(one_row(columns=3), name="odd"), lambda: hvd.allgather(one_row(), name="odd")),
    ("shape", lambda: hvd.allgather(one_row()[0], name="odd"), lambda: hvd.allgather(one_row(), name="odd")),
    ("dtype", lambda: hvd.alltoall(one_row(tf.float64, 3), name="odd"), lambda: hvd.alltoall(one_row(), name="odd")),
    ("shape of tensor 0", lambda: hvd.alltoall(one_row(columns=3), name="odd"),
     lambda: hvd.alltoall(one_row(), name="odd")),
    ("dtype", lambda: hvd.broadcast(one_row(tf.float64, 3), 1, name="odd"),
     lambda: hvd.broadcast(one_row(), 0, name="odd")),
    ("shape", lambda: hvd.broadcast(one_row(columns=3), 1, name="odd"),
     lambda: hvd.broadcast(one_row(), 0, name="odd")),
    ("root rank", lambda: hvd.broadcast(one_row(), 1, name="odd"), lambda: hvd.broadcast(one_row(), 0, name="odd")),
]


@pytest.mark.horovod("mismatch", "mismatch-order")
@pytest.mark.parametrize("number", range(len(ORDER)))
def test_of_several_differences_the_first_in_the_order_is_told_on_every_rank(number: int, rank: int,
                                                                             size: int) -> None:
    aspect, of_last, of_others = ORDER[number]
    with pytest.raises(tf.errors.FailedPreconditionError, match=f"odd: the ranks disagree on {aspect}") as raised:
        (of_last if rank == size - 1 else of_others)()
    assert isinstance(raised.value, mpistrat.MismatchError) and raised.value.message == str(raised.value)
    texts = mpistrat.allgather_object(str(raised.value))
    assert texts == texts[:1] * size and f"ranks [{size - 1}]" in texts[0]


@pytest.mark.horovod("no-scalars")
@pytest.mark.parametrize("collective", ["allgather", "grouped_allgather", "alltoall", "reducescatter",
                                        "grouped_reducescatter"])
def test_a_scalar_is_an_invalid_argument(collective: str) -> None:
    text = "(rank-zero tensor|does not support scalar inputs)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        COLLECTIVES[collective](tf.constant(1.0), hvd.global_process_set)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match=text):
        in_graph(lambda: COLLECTIVES[collective](tf.constant(1.0), hvd.global_process_set))()


@pytest.mark.horovod("alltoall-errors")
def test_rows_or_splits_that_do_not_fit_an_alltoall_are_invalid_arguments(size: int) -> None:
    for call, text in ((lambda: hvd.alltoall(tf.ones([size + 1])), "not an even multiple|must be divisible"),
                       (lambda: hvd.alltoall(tf.ones([size]), [1] * (size + 1)), "one integer for each of the"),
                       (lambda: hvd.alltoall(tf.ones([size]), [[1] * size]), "one integer for each of the"),
                       (lambda: hvd.alltoall(tf.ones([size]), [2] * size), "more than the")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            call()


# -- dtypes and shapes ------------------------------------------------------------------------------------------------

SENT = [tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool,
        tf.uint32, tf.uint64, tf.bfloat16, tf.complex64]


@pytest.mark.horovod("dtypes-gather", "dtypes-in-place")
@pytest.mark.parametrize("dtype", SENT, ids=lambda dtype: dtype.name)
def test_alltoall_grouped_gathers_and_broadcasts_in_place_of_every_dtype(dtype: Any, rank: int, size: int) -> None:
    own = tf.cast([rank, 1], dtype)
    exchanged = hvd.alltoall(tf.cast(tf.fill([size], rank), dtype))
    gathered, _ = hvd.grouped_allgather([own[:1], tf.constant([1])])
    for result in (exchanged, gathered):
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, tf.cast(tf.range(size), dtype))
    variable = tf.Variable(own)
    value, = hvd.broadcast_([variable], size - 1)
    assert value.dtype == dtype
    np.testing.assert_array_equal(variable, tf.cast([size - 1, 1], dtype))


@pytest.mark.horovod("no-elements")
def test_every_collective_takes_tensors_without_elements(size: int) -> None:
    for name, collective in COLLECTIVES.items():
        if not name.startswith("broadcast_"):
            for result in tf.nest.flatten(collective(tf.ones([0, 3]), hvd.global_process_set)):
                assert result.shape == (0, 3), name
    rows, received = hvd.alltoall(tf.ones([2, 3]), [0] * size)
    assert rows.shape == (0, 3) and received.numpy().tolist() == [0] * size


@tf.custom_gradient
def with_a_float32_gradient(x: Any) -> Any:
    """As some operations of TensorFlow, which return a gradient of another dtype than that of their input."""
    return tf.identity(x), lambda upstream: tf.cast(upstream, tf.float32)


@pytest.mark.horovod("dtype-of-gradients")
@pytest.mark.parametrize("collective", [name for name in COLLECTIVES if not name.startswith("broadcast_")])
def test_gradients_of_another_dtype_pass_through(collective: str, rank: int, size: int) -> None:
    x = tf.ones([size], tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(x)
        result, = tf.nest.flatten(COLLECTIVES[collective](x, hvd.global_process_set))
        y = with_a_float32_gradient(result)
    gradient = tape.gradient(y, x)
    np.testing.assert_allclose(tf.cast(gradient, tf.float64), [float(collective != "broadcast" or rank == 0)] * size,
                               rtol=1e-6)


# -- init with process sets -------------------------------------------------------------------------------------------


@pytest.mark.horovod("init-again")
def test_a_repeated_init_registers_process_sets(rank: int, size: int) -> None:
    process_set = hvd.ProcessSet([0])
    for _ in range(2):
        mpistrat.init(process_sets=[process_set])
        assert process_set.included() == (rank == 0)
    assert hvd.remove_process_set(process_set)


@pytest.mark.horovod("init-equal-sets")
def test_equal_process_sets_are_an_error_of_init_and_the_job_is_initialised(size: int) -> None:
    mpistrat.shutdown()
    with pytest.raises(ValueError, match=r"registered already|twice"):
        mpistrat.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet([0])])
    assert mpistrat.is_initialized()
    assert hvd.allreduce(1, op=hvd.Sum).numpy() == size
