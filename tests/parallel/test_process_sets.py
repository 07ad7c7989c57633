"""Process sets: collectives among some of the ranks, in any order, and what is wrong input."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.api import process_sets, runtime
from mpistrat.core.errors import InvalidRequestError, MismatchError, MpistratError
from mpistrat.core.request import allreduce_request, scaled_op, specs_of
from mpistrat.process import abort


@pytest.fixture
def two_sets(rank: int, size: int) -> Iterator[tuple[mpistrat.ProcessSet, mpistrat.ProcessSet]]:
    """All ranks but the last, and all but the first: with three ranks they overlap."""
    first = mpistrat.add_process_set(range(size - 1))
    last = mpistrat.add_process_set(range(1, size))
    yield first, last
    assert mpistrat.remove_process_set(last)
    assert mpistrat.remove_process_set(first)


def test_every_collective_on_arrays_runs_in_a_set(rank: int, size: int, two_sets: tuple) -> None:
    for process_set in two_sets:
        if not process_set.included():
            continue
        ranks, n = process_set.ranks, process_set.size()
        own = np.full(3, rank, np.float32)
        assert mpistrat.allreduce(own, op=mpistrat.Sum, process_set=process_set).tolist() == [sum(ranks)] * 3
        assert mpistrat.allreduce(own, process_set=process_set).tolist() == [np.float32(sum(ranks) / n)] * 3
        assert mpistrat.allgather(own[:1], process_set=process_set).tolist() == ranks
        assert mpistrat.broadcast(own, ranks[-1], process_set=process_set).tolist() == [ranks[-1]] * 3
        assert mpistrat.broadcast_object({"from": rank}, ranks[-1], process_set=process_set) == {"from": ranks[-1]}
        assert mpistrat.allgather_object(rank, process_set=process_set) == ranks
        mpistrat.barrier(process_set=process_set)
        assert process_set.rank() == ranks.index(rank)


def test_overlapping_sets_run_in_any_order(rank: int, size: int, two_sets: tuple) -> None:
    mine = [each for each in two_sets if each.included()]
    order = mine if rank % 2 else mine[::-1]
    for turn in range(20):
        pending = {id(each): mpistrat.allreduce_async(np.full(2000 * turn + 1, rank), op=mpistrat.Sum,
                                                      name=f"turn{turn}", process_set=each) for each in order}
        everybody = mpistrat.allreduce(np.array([rank]), op=mpistrat.Sum)
        assert everybody.tolist() == [size * (size - 1) // 2]
        for each in order[::-1]:
            assert set(pending[id(each)].wait().tolist()) == {sum(each.ranks)}


def test_a_set_runs_while_another_waits(rank: int, size: int, two_sets: tuple) -> None:
    """The last rank enters the set of the other ranks' collective late; the global one must not wait for it."""
    first, _ = two_sets
    if first.included():
        late = mpistrat.allreduce_async(np.ones(2), name="late", process_set=first)
    for _ in range(5):
        mpistrat.barrier()
    if first.included():
        assert late.wait().tolist() == [1.0, 1.0]


def test_threads_use_sets_at_the_same_time(rank: int, size: int, two_sets: tuple) -> None:
    results: dict[int, list[float]] = {}

    def reduce_in(place: int, process_set: mpistrat.ProcessSet) -> None:
        for turn in range(30):
            got = mpistrat.allreduce(np.full(500, rank + turn), op=mpistrat.Sum, process_set=process_set)
            results.setdefault(place, []).append(float(got[0]) - turn * process_set.size())

    threads = [threading.Thread(target=reduce_in, args=(place, each))
               for place, each in enumerate((*two_sets, mpistrat.global_process_set)) if each.included()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, each in enumerate((*two_sets, mpistrat.global_process_set)):
        if each.included():
            assert results[place] == [sum(each.ranks)] * 30


@pytest.mark.horovod("broadcast")
@pytest.mark.parametrize("graph", [False, True])
def test_tensors_and_gradients_in_a_set(rank: int, size: int, two_sets: tuple, graph: bool) -> None:
    for process_set in two_sets:
        if not process_set.included():
            continue
        ranks, n, root = process_set.ranks, process_set.size(), process_set.ranks[-1]
        variable = tf.Variable([float(rank), 1.0])

        def step(variable=variable, process_set=process_set, root=root) -> tuple:
            with tf.GradientTape(persistent=True) as tape:
                total = hvd.allreduce(variable, op=hvd.Sum, process_set=process_set, name="total")
                together = hvd.allgather(variable, process_set=process_set, name="together")
                sent = hvd.broadcast(variable, root, process_set=process_set, name="sent")
            weights = tf.range(1.0, 2.0 * len(process_set.ranks) + 1)
            return (total, together, sent, tape.gradient(total, variable),
                    tape.gradient(together, variable, output_gradients=weights), tape.gradient(sent, variable))

        total, together, sent, *gradients = (tf.function(step) if graph else step)()
        assert total.numpy().tolist() == [sum(ranks), n]
        assert together.numpy().reshape(-1, 2)[:, 0].tolist() == ranks
        assert sent.numpy().tolist() == [root, 1.0]
        assert gradients[0].numpy().tolist() == [n, n]
        place = process_set.rank()
        assert gradients[1].numpy().tolist() == [2.0 * place + 1, 2.0 * place + 2]
        assert gradients[2].numpy().tolist() == ([1.0, 1.0] if rank == root else [0.0, 0.0])


def test_variables_are_broadcast_in_a_set(rank: int, size: int, two_sets: tuple) -> None:
    variable = tf.Variable([float(rank)])
    first, _ = two_sets
    if first.included():
        hvd.broadcast_variables([variable], root_rank=first.ranks[-1], process_set=first)
    assert variable.numpy().tolist() == [size - 2 if first.included() else rank]


def test_ranks_outside_are_refused(rank: int, size: int, two_sets: tuple) -> None:
    for process_set in two_sets:
        if process_set.included():
            continue
        assert process_set.rank() is None and process_set.size() == size - 1
        with pytest.raises(InvalidRequestError, match=r"not a member of the provided process set, whose ranks are \["):
            mpistrat.allreduce(np.ones(1), process_set=process_set)
        with pytest.raises(tf.errors.InvalidArgumentError, match="Allgather: this rank is not a member"):
            hvd.allgather(tf.ones(1), process_set=process_set)


@pytest.mark.horovod("broadcast-root")
def test_a_mismatch_in_a_set_names_ranks_of_the_job(rank: int, size: int, two_sets: tuple) -> None:
    _, last = two_sets
    if last.included() and last.size() > 1:
        with pytest.raises(MismatchError, match=rf"shape: \(1,\) on ranks \[1\].*on ranks \[{size - 1}\]"):
            mpistrat.allreduce(np.ones(1 if rank == 1 else 2), process_set=last, name="differs")
        with pytest.raises(MismatchError, match=rf"root rank: 1 on ranks \[1\]; {size - 1} on ranks \[{size - 1}\]"):
            mpistrat.broadcast(np.ones(1), rank, process_set=last, name="differs")
        with pytest.raises(InvalidRequestError, match="invalid root rank 0"):
            mpistrat.broadcast(np.ones(1), 0, process_set=last)


@pytest.mark.horovod("process-set", "add-set", "remove-set")
def test_wrong_sets_are_errors_on_all_ranks_and_change_nothing(rank: int, size: int) -> None:
    for wrong, text in (([], "at least one rank"), ([size], "at least one rank"), (range(size), "registered already"),
                        ([rank], "disagree"), ([0] if rank else [1], "disagree")):
        with pytest.raises(ValueError, match=text):
            mpistrat.add_process_set(wrong)
    for wrong in ([0, 0], ["0"], [0.5], [True], "01", 1.0, [-1]):
        with pytest.raises(ValueError, match="distinct ranks"):
            mpistrat.ProcessSet(wrong)
    added = mpistrat.add_process_set([0])
    with pytest.raises(ValueError, match=f"as set {added.process_set_id}"):
        mpistrat.add_process_set([0])
    assert mpistrat.remove_process_set(added)
    assert not mpistrat.remove_process_set(added)
    assert not mpistrat.remove_process_set(mpistrat.global_process_set)
    with pytest.raises(InvalidRequestError, match="has not been registered"):
        mpistrat.barrier(process_set=added)


def test_the_numbers_of_unnamed_calls_start_again_with_each_set(rank: int, size: int) -> None:
    """The rank that is in the second set only has made none of the calls in the first."""
    names = []
    for ranks in (range(size - 1), range(1, size)):
        process_set = mpistrat.add_process_set(ranks)
        if process_set.included():
            result = mpistrat.allreduce_async(np.ones(1), op=mpistrat.Sum, process_set=process_set)
            assert result.wait().tolist() == [size - 1]
            names.append(result.name)
        assert mpistrat.remove_process_set(process_set)
    assert set(names) == {"allreduce.0"}


def test_the_numbers_of_optimizers_start_again_with_init(rank: int, size: int) -> None:
    """A rank that has averaged in a set, and is in the set with the same id of the next init, has no more of them."""
    if size < 3:
        pytest.skip("two sets that have one rank in common, and are not all ranks, need three")
    for ranks in ([0, size - 1], [0, 1]):
        mpistrat.shutdown()
        mpistrat.init()
        process_set = mpistrat.add_process_set(ranks)
        if process_set.included():
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=process_set)
            weight = keras.Variable(np.zeros(2, np.float32))
            optimizer.apply([tf.fill([2], float(rank))], [weight])
            assert weight.numpy().tolist() == [-sum(ranks) / len(ranks)] * 2
        mpistrat.barrier()
    assert mpistrat.remove_process_set(process_set)


def test_a_function_traced_for_a_removed_set_does_not_run_in_a_later_one(rank: int, size: int) -> None:
    removed = mpistrat.add_process_set([0])
    traced = tf.function(lambda value: hvd.allreduce(value, process_set=removed, name="traced"))
    if removed.included():
        assert traced(tf.ones(1)).numpy().tolist() == [1.0]
    assert mpistrat.remove_process_set(removed)
    later = mpistrat.add_process_set([0])
    if later.included():
        with pytest.raises(tf.errors.InvalidArgumentError, match="does not exist or has not been registered"):
            traced(tf.ones(1))
    assert mpistrat.remove_process_set(later)


def test_ranks_that_remove_different_sets_get_an_error(rank: int, size: int, two_sets: tuple) -> None:
    number = two_sets[0].process_set_id
    with pytest.raises(InvalidRequestError, match=rf"the process set to remove: set {number} on ranks \[0\]"):
        mpistrat.remove_process_set(two_sets[0] if rank == 0 else two_sets[1])


@pytest.mark.parametrize("failing", ["backends_over", "Group"])
def test_a_set_that_some_rank_cannot_connect_is_an_error_on_all_ranks_and_changes_nothing(
        failing: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 fails at the second of two sets, where other ranks do not. The ranks of the first are connected then."""
    original = getattr(process_sets, failing)

    def fails(*args: Any) -> Any:
        if rank == 0:
            raise OSError("no room for the set")
        return original(*args)

    second = range(1) if failing == "backends_over" else range(max(1, size - 1))
    sets = [mpistrat.ProcessSet(range(1, size)), mpistrat.ProcessSet(second)]
    with monkeypatch.context() as patch, pytest.raises(
            MpistratError, match=r"^ranks \[0\] cannot connect to the process set \[0.*\]: OSError\('no room for"):
        patch.setattr(process_sets, failing, fails)
        runtime.current().registry.add(sets)
    assert [each.process_set_id for each in sets] == [None, None]
    runtime.current().registry.add(sets)
    for each in sets:
        if each.included():
            assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum, process_set=each) == each.size()
    for each in sets:
        assert mpistrat.remove_process_set(each)


@pytest.mark.horovod("add-set-comm")
def test_a_communicator_makes_a_set_on_each_side(rank: int, size: int) -> None:
    from mpi4py import MPI
    halves = MPI.COMM_WORLD.Split(rank % 2)
    process_set = mpistrat.add_process_set(mpistrat.ProcessSet(halves))
    assert process_set.ranks == list(range(rank % 2, size, 2)) and process_set.mpi_comm is halves
    assert mpistrat.allreduce(np.array([rank]), op=mpistrat.Sum, process_set=process_set) == sum(process_set.ranks)
    assert mpistrat.remove_process_set(process_set)
    halves.Free()


@pytest.mark.horovod("init-sets", "process-set")
def test_init_registers_sets_and_shutdown_forgets_them(rank: int, size: int) -> None:
    mpistrat.shutdown()
    process_set = mpistrat.ProcessSet([size - 1])
    assert process_set.size() is process_set.rank() is process_set.included() is None
    mpistrat.init(process_sets=[process_set])
    assert process_set.process_set_id == 1 and process_set.included() == (rank == size - 1)
    if process_set.included():
        assert mpistrat.allgather(np.ones(1), process_set=process_set).tolist() == [1.0]
    mpistrat.shutdown()
    assert process_set.process_set_id is None
    with pytest.raises(ValueError, match="not been initialized"):
        mpistrat.global_process_set.size()
    mpistrat.init(process_sets="dynamic")
    assert mpistrat.global_process_set.ranks == list(range(size))


def test_shutdown_after_a_set_has_failed_waits_for_no_rank(rank: int, size: int, restart: Callable[[], None]) -> None:
    """The last rank is not in the set, and does not know that it has failed."""
    if size < 3:
        pytest.skip("needs a set of two ranks and a rank that is not in it")
    process_set = mpistrat.add_process_set([0, 1])
    if process_set.included():
        own = np.ones(1 + rank)
        request = dataclasses.replace(allreduce_request("differs", specs_of([own]), scaled_op(None)), in_graph=True)
        with pytest.raises(MismatchError, match="differs: the ranks disagree on shape"):
            process_set.group("differs").engine.run(request, [own]).wait()
    job = runtime.current()
    job.settings = dataclasses.replace(job.settings, stall_abort_s=3.0)
    began = time.monotonic()
    restart()
    assert time.monotonic() - began < 3.0
    assert abort._end is None, "the job ends in order"
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum).tolist() == [size]


def test_tapes_of_several_sets_do_not_wait_for_each_other(rank: int, two_sets: tuple) -> None:
    """All ranks train a trunk, and some of them a head."""
    first, _ = two_sets
    trunk, head = tf.Variable(tf.ones([4])), tf.Variable(tf.ones([3]))
    for _ in range(5):
        for variable, ranks in ((trunk, mpistrat.global_process_set), (head, first)):
            if ranks.included():
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(variable * variable) * (1 + rank)
                hvd.DistributedGradientTape(tape, process_set=ranks).gradient(loss, [variable])
    mpistrat.barrier()
    groups = runtime.current().registry.groups
    assert not any(group.engine.controller.queue.in_flight() for group in groups.values())


@pytest.mark.horovod("one-rank")
def test_optimizers_tapes_and_callbacks_take_a_set(rank: int, size: int, two_sets: tuple) -> None:
    import keras

    import mpistrat.keras as hvd_keras
    first, _ = two_sets
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization(),
                              keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.1), process_set=first), "mse", metrics=["mae"])
    rows = np.random.default_rng(rank).normal(size=(8, 2)).astype("float32")
    history = model.fit(rows, rows.sum(1), batch_size=4, epochs=2, verbose=0, callbacks=[
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, process_set=first),
        hvd_keras.callbacks.MetricAverageCallback(process_set=first), keras.callbacks.EarlyStopping("mae")])
    if first.included():
        found = mpistrat.allgather_object([w.tobytes() for w in model.get_weights()], process_set=first)
        assert all(other == found[0] for other in found)
        maes = mpistrat.allgather_object(history.history["mae"], process_set=first)
        assert all(other == maes[0] for other in maes)
    digests = mpistrat.allgather_object(model.get_weights()[0].tobytes())
    assert len(set(digests)) == 2, "the last rank has trained alone"

    variable = tf.Variable([1.0 + rank])
    with tf.GradientTape() as tape:
        loss = variable * (1.0 + rank)
    gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum, process_set=first).gradient(loss, variable)
    assert gradient.numpy().tolist() == [size * (size - 1) / 2 if first.included() else 1.0 + rank]


def test_an_optimizer_of_a_set_that_is_not_registered_is_refused(rank: int) -> None:
    import keras

    import mpistrat.keras as hvd_keras
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=mpistrat.ProcessSet([0, 1]))
    with pytest.raises(InvalidRequestError, match="has not been registered"):
        optimizer.apply([tf.ones([1])], [keras.Variable([1.0])])
