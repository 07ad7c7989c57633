"""Horovod's conventions for names, errors and dtypes of collectives, and its names that need several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from mpistrat.core.errors import InvalidRequestError
from mpistrat.core.handle import Entry
from mpistrat.keras import elastic
from mpistrat.keras.callbacks import BestModelCheckpoint, BroadcastGlobalVariablesCallback, MetricAverageCallback

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
    ("dtype", lambda: hvd.allgather(one_row(tf.float64, 3), name="odd"), lambda: hvd.allreduce(one_row(), name="odd")),
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
def test_of_several_differences_the_first_in_the_order_is_told_on_every_rank(number: int, rank: int, size: int) -> None:
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


@tf.function
def queried(number: int) -> list[tf.Tensor]:
    return [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.size_op(number),
            hvd.process_set_included_op(number), hvd.process_set_included_op(77)]


@pytest.mark.horovod("query-ops", "add-set")
def test_queries_are_answered_when_the_graph_runs(rank: int, size: int) -> None:
    process_set = hvd.add_process_set([size - 1])
    number = process_set.process_set_id
    everywhere = [rank, size, hvd.local_rank(), hvd.local_size()]
    assert [int(value) for value in queried(number)] == [*everywhere, 1, int(rank == size - 1), -3]
    assert [value.dtype for value in queried(number)] == [tf.int32] * 7
    assert all(value.shape == () for value in queried.get_concrete_function(number).outputs)
    eager = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(name="mine"), hvd.size_op(number),
             hvd.process_set_included_op(number), hvd.process_set_included_op(77)]
    assert [int(value) for value in eager] == [*everywhere, 1, int(rank == size - 1), -3]
    hvd.remove_process_set(process_set)
    queried.get_concrete_function(number + 1)  # Traced before there is a set with this number.
    process_set = hvd.add_process_set(range(size - 1))
    assert process_set.process_set_id == number + 1
    assert [int(value) for value in queried(number + 1)][4:6] == [size - 1, int(rank < size - 1)]
    hvd.remove_process_set(process_set)


@pytest.mark.horovod("unknown-set")
def test_the_size_of_an_unknown_set_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="no process set with the id 77 is registered"):
        hvd.size_op(77)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no process set with the id 77 is registered"):
        tf.function(lambda: hvd.size_op(77))()


@pytest.mark.horovod("broadcast-object", "broadcast-object-fn", "allgather-object")
@pytest.mark.parametrize("door", [hvd, mpistrat.keras])
def test_objects_with_a_session(rank: int, size: int, door: object) -> None:
    assert door.broadcast_object({"root": rank}, 1, None, "named") == {"root": 1}
    assert door.broadcast_object({"root": rank}, 0, session="ignored", name="named") == {"root": 0}
    assert door.allgather_object(rank, "ignored", name="named") == list(range(size))
    assert hvd.broadcast_object_fn(1, None, "named")({"root": rank}) == {"root": 1}


@pytest.mark.horovod("keras-collectives")
def test_reducescatter_of_keras(rank: int, size: int) -> None:
    rows = np.arange(2.0 * size).reshape(size, 2)
    assert mpistrat.keras.reducescatter(rows).numpy().tolist() == [rows[rank].tolist()]
    assert mpistrat.keras.reducescatter(rows, "named", hvd.Sum).numpy().tolist() == [(rows[rank] * size).tolist()]


# -- elastic states ---------------------------------------------------------------------------------------------------


@pytest.mark.horovod("elastic-state")
def test_sync_takes_the_state_of_rank_0(rank: int) -> None:
    variable = tf.Variable([float(rank), 1.0])
    state = hvd.elastic.TensorFlowState([variable], epoch=rank, history=[rank] * (rank + 1))
    state.epoch += 10
    state.sync()
    assert variable.numpy().tolist() == [0.0, 1.0]
    assert (state.epoch, state.history) == (10, [0])
    variable.assign([float(rank), 5.0])
    state.epoch = rank
    state.restore()  # to what sync has saved
    assert variable.numpy().tolist() == [0.0, 1.0]
    assert state.epoch == 10


def test_a_state_that_only_rank_0_has_in_full_reaches_all(rank: int) -> None:
    state = hvd.elastic.ObjectState(epoch=1, **({"best": 0.5} if rank == 0 else {}))
    state.sync()
    assert state.best == 0.5
    state.best = 0.0
    state.restore()
    assert state.best == 0.5


@pytest.mark.horovod("elastic-run")
def test_a_model_is_trained_from_the_state_of_rank_0(rank: int, size: int) -> None:
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)), "mse")
    state = elastic.KerasState(model, batch=0, epoch=0)

    @elastic.run
    def train(state: elastic.KerasState, fail: bool) -> None:
        model.fit(np.full((4, 2), rank + 1.0), np.ones((4, 1)), batch_size=2, epochs=2 - state.epoch % 2, verbose=0,
                  callbacks=[elastic.UpdateEpochStateCallback(state), elastic.CommitStateCallback(state)])
        if fail:
            model.set_weights([np.zeros_like(weight) for weight in model.get_weights()])
            state.epoch = 100
            raise ZeroDivisionError("on all ranks")

    train(state, False)
    assert state.epoch == 2
    with pytest.raises(ZeroDivisionError):
        train(state, True)
    assert state.epoch == 4
    assert np.any(model.get_weights()[0])
    weights = mpistrat.allgather_object([weight.tolist() for weight in model.get_weights()])
    assert all(each == weights[0] for each in weights)


# -- callbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("best-model")
@pytest.mark.parametrize("is_strategy", [False, True])
def test_one_rank_writes_the_best_model(rank: int, is_strategy: bool, shared_dir: str) -> None:
    path = Path(shared_dir, "best.keras")
    with hvd.MPIStrategy().scope() if is_strategy else tf.init_scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(optimizer if is_strategy else hvd.DistributedOptimizer(optimizer), "mse")
    checkpoint = BestModelCheckpoint(monitor="loss")
    checkpoint.filepath = path if rank == 0 or is_strategy else path.with_name(f"rank{rank}.keras")
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 1)), np.ones((8, 1)))).batch(4)
    broadcast = [] if is_strategy else [BroadcastGlobalVariablesCallback(0)]
    model.fit(data, epochs=2, verbose=0, callbacks=[*broadcast, MetricAverageCallback(), checkpoint])
    mpistrat.barrier()
    assert [file.name for file in Path(shared_dir).iterdir()] == ["best.keras"]
