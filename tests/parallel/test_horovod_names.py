"""Horovod's names with several ranks: queries in graphs, objects, states that are synchronised, best checkpoints."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from mpistrat.core.errors import InvalidRequestError
from mpistrat.keras import elastic
from mpistrat.keras.callbacks import BestModelCheckpoint, BroadcastGlobalVariablesCallback, MetricAverageCallback


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
