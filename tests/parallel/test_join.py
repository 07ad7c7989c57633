"""join(): ranks with fewer batches wait, and the collectives of the others go on without them."""

import threading
import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras as keras_hvd
import mpistrat.tensorflow as hvd
from mpistrat.api import runtime
from mpistrat.negotiation.subtree import JOIN

from ..support.levels import sample
from .helpers import assert_close, everywhere


def active_in(step: int, size: int) -> list[int]:
    """The ranks that make this step, if rank r makes r + 1 steps."""
    return list(range(step, size))


# -- arrays -----------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("join", "join-min-max")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "uint8"])
def test_reductions_are_those_of_the_ranks_that_have_not_joined(dtype: str, rank: int, size: int) -> None:
    for step in range(rank + 1):
        active = active_in(step, size)
        values = np.array([r + 2 for r in active])
        own = np.full(1000 * step + 1, rank + 2, dtype)
        for op, expected in ((mpistrat.Sum, values.sum()), (mpistrat.Min, values.min()), (mpistrat.Max, values.max()),
                             (mpistrat.Product, values.prod())):
            assert set(mpistrat.allreduce(own, op=op).tolist()) == {expected}
        mean = mpistrat.allreduce(own)[0]
        assert mean == (int(values.mean()) if own.dtype.kind in "iu" else own.dtype.type(values.mean()))
    assert mpistrat.join() == size - 1
    assert mpistrat.allreduce(np.ones(1, dtype), op=mpistrat.Sum).tolist() == [size]


@pytest.mark.horovod("join-others")
def test_the_other_collectives(rank: int, size: int) -> None:
    for step in range(rank + 1):
        active = active_in(step, size)
        assert mpistrat.allgather(np.full((rank, 2), rank))[:, 0].tolist() == [r for r in active for _ in range(r)]
        assert mpistrat.broadcast(np.array([rank, step]), size - 1).tolist() == [size - 1, step]
        assert everywhere(rank) == active
        mpistrat.barrier()
        first, second = mpistrat.grouped_allreduce([np.full(3, rank), np.full(70_000, float(rank))], op=mpistrat.Sum)
        assert first.tolist() == [sum(active)] * 3
        assert set(second.tolist()) == {float(sum(active))}
    assert mpistrat.join() == size - 1


def test_the_numbers_of_unnamed_calls_start_again_after_join(rank: int, size: int) -> None:
    for _ in range(rank + 1):
        mpistrat.allreduce_async(np.ones(1)).wait()
    mpistrat.join()
    result = mpistrat.allreduce_async(np.ones(1), op=mpistrat.Sum)
    assert result.wait().tolist() == [size]
    assert result.name == "allreduce.0"


def test_adasum_of_the_others(rank: int, size: int) -> None:
    own = np.random.default_rng(rank).normal(size=50)
    if rank == 0:
        last = mpistrat.join()
    else:
        result = mpistrat.allreduce(own, op=mpistrat.Adasum)
        if size == 2:
            np.testing.assert_array_equal(result, own)
        last = mpistrat.join()
    assert last != 0 or size == 1


@pytest.mark.horovod("join-others")
@pytest.mark.parametrize("call", [
    lambda: mpistrat.alltoall(np.zeros(12)), lambda: mpistrat.reducescatter(np.zeros(12)),
    lambda: mpistrat.broadcast(np.zeros(1), 0), lambda: mpistrat.allreduce(1.0, op=mpistrat.Max, prescale_factor=2.0)],
    ids=["alltoall", "reducescatter", "broadcast", "max"])
def test_what_has_no_result_is_an_error_on_the_other_ranks(call: Any, rank: int, size: int) -> None:
    mpistrat.barrier()
    if rank:
        while mpistrat.allgather(np.ones(1)).size == size:  # until rank 0 has joined
            pass
        with pytest.raises(mpistrat.MismatchError, match=r"not supported with join\(\) at this time: ranks \[0\]"):
            call()
    elif size > 1:
        pass
    mpistrat.join()
    call()


def test_a_rank_joins_once_at_a_time(rank: int, size: int) -> None:
    from mpi4py import MPI
    thread = threading.Thread(target=mpistrat.join)
    if rank < size - 1:
        thread.start()
        while not runtime.current().engine.controller.queue.has(JOIN.name):
            pass
        with pytest.raises(mpistrat.DuplicateNameError, match=r"join\(\): "):
            mpistrat.join()
    MPI.COMM_WORLD.Barrier()  # Not ours, which goes on without ranks that have joined.
    if rank == size - 1:
        thread.start()
    thread.join()


def test_process_sets_join_by_themselves(rank: int, size: int) -> None:
    process_set = mpistrat.add_process_set(range(1, size)) if size > 2 else None
    if process_set is not None and process_set.included():
        if rank > 1:
            assert mpistrat.allreduce(np.float64(rank), process_set=process_set) in (
                np.mean(range(1, size)), np.mean(range(2, size)))
        assert mpistrat.join(process_set=process_set) in range(1, size)
    assert mpistrat.allreduce(1, op=mpistrat.Sum) == size
    if process_set is not None:
        assert mpistrat.remove_process_set(process_set)


def test_process_sets_cannot_change_meanwhile(rank: int, size: int) -> None:
    if rank == 0 or size == 1:
        mpistrat.join()
        return
    while mpistrat.allgather(np.ones(1)).size == size:
        pass
    with pytest.raises(ValueError, match=r"process sets cannot change while some ranks wait in join"):
        mpistrat.add_process_set([1])
    mpistrat.join()


# -- TensorFlow -------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("join")
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_tensors_of_a_loop(in_graph: bool, rank: int, size: int) -> None:
    def step(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        slices = tf.IndexedSlices(tf.fill([1, 2], value), tf.constant([rank], tf.int64), tf.constant([size, 2]))
        return (hvd.allreduce(value, name="value"), tf.convert_to_tensor(hvd.allreduce(slices, name="slices")))

    function = tf.function(step) if in_graph else step
    for number in range(rank + 1):
        active = active_in(number, size)
        mean, dense = function(tf.constant(float(rank + 1)))
        assert float(mean) == np.float32(np.mean(active) + 1)
        expected = np.zeros((size, 2), np.float32)
        for r in active:
            expected[r] = np.float32(r + 1) / np.float32(len(active))
        np.testing.assert_array_equal(dense.numpy(), expected)
    last = (tf.function(hvd.join) if in_graph else hvd.join)()
    assert last.dtype == tf.int32
    assert int(last) == size - 1


def test_numbers_of_executions_begin_anew(rank: int, size: int) -> None:
    """The gradient of a function that runs collectives has their execution's number in its names."""
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x * x, op=hvd.Sum, name="square")

    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = inner(x)
        return tape.gradient(y, x)

    for number in range(rank + 1):
        x = tf.constant(float(rank + 1))
        assert float(step(x)) == 2 * (rank + 1) * len(active_in(number, size))
    hvd.join()
    assert float(step(tf.constant(3.0))) == 6 * size


def test_a_loop_with_a_tape_ends_with_the_weights_of_the_last_rank(rank: int, size: int) -> None:
    weight = tf.Variable([1.0, 2.0])

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x)
        weight.assign_sub(hvd.DistributedGradientTape(tape).gradient(loss, weight))

    for _ in range(2):
        for _ in range(rank + 1):
            step(tf.constant([1.0, float(rank)]))
        hvd.broadcast_variables([weight], int(hvd.join()))
    expected = np.array([1.0, 2.0])
    for _ in range(2):
        for number in range(size):
            expected -= [1.0, np.mean(active_in(number, size))]
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)
    assert len(set(everywhere(weight.numpy().tobytes()))) == 1


# -- fit --------------------------------------------------------------------------------------------------------------


BATCH, COLUMNS = 4, 3


def new_model(**arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(2), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])
    model.compile(keras_hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), **arguments), loss="mse",
                  run_eagerly=arguments.get("backward_passes_per_step", 1) > 1)
    return model


def rows_of(rank: int) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(rank).normal(size=(BATCH * (rank + 1) + 1, COLUMNS)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def state_of(model: Any) -> list[bytes]:
    return [keras.ops.convert_to_numpy(v).tobytes() for v in (*model.weights, *model.optimizer.variables)]


@sample("arguments", [{}, {"backward_passes_per_step": 2}], ids=["", "accumulated"])
@sample("validates", [True, False], ids=["validation", "no validation"])
def test_fit_on_uneven_rows(validates: bool, arguments: dict, rank: int, size: int) -> None:
    model, (x, y) = new_model(uneven="join", **arguments), rows_of(rank)
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if arguments and not validates and rank == 0 and batch == 1:
                time.sleep(0.3)  # So that the rank with the fewest batches is the last to join in the first epoch.

        def on_test_begin(self, logs: Any = None) -> None:
            seen.append([v.numpy().tobytes() for v in self.model.trainable_variables])

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            seen.append(state_of(self.model))

    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, validation_data=(x[:4], y[:4]) if validates else None,
              callbacks=[Look(), keras_hvd.callbacks.LearningRateWarmupCallback(0.1, 2)])
    found = everywhere(seen)
    assert len(seen) == (6 if validates else 3)
    assert all(other == found[0] for other in found)
    assert int(model.optimizer.iterations) == 3 * (size + 1) // arguments.get("backward_passes_per_step", 1)


def test_uneven_steps_are_averages_over_the_ranks_that_make_them(rank: int, size: int) -> None:
    """The first rank alone makes as many steps as one process does with the batches of all ranks together."""
    def trained(optimizer: Any, batches: list[tuple[np.ndarray, np.ndarray]], **arguments: Any) -> list[np.ndarray]:
        model = keras.Sequential([keras.Input((COLUMNS,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, loss="mse")
        data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=(
            tf.TensorSpec([None, COLUMNS]), tf.TensorSpec([None, 1])))
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    def batches_of(r: int) -> list[tuple[np.ndarray, np.ndarray]]:
        x, y = rows_of(r)
        return [(x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, BATCH * (r + 1), BATCH)]

    own = trained(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5), uneven="join"),
                  batches_of(rank))
    together = [[batches_of(r)[step] for r in active_in(step, size)] for step in range(size)]
    alone = trained(keras.optimizers.SGD(0.05, momentum=0.5),
                    [(np.concatenate([x for x, _ in step]), np.concatenate([y for _, y in step])) for step in together])
    assert_close(own, alone, 1e-6, rtol=2e-5)


def test_the_ranks_must_agree_on_uneven(rank: int, size: int) -> None:
    with pytest.raises(mpistrat.MismatchError, match=r"only some ranks pass uneven='join': "
                                                     r"True on ranks \[0\]; False on ranks \[1"):
        new_model(uneven="join" if rank == 0 else "error").fit(*rows_of(0), verbose=0)


def test_uneven_is_one_of_two_words() -> None:
    with pytest.raises(ValueError, match=r"uneven must be 'error' or 'join'\. Received: 'pad'"):
        new_model(uneven="pad")
