"""Some ranks are killed amid collectives, the others recover and go on: ranks_lost.py KIND VICTIMS DELAY.

KIND is one of the functions below, for those of TensorFlow also with "compiled_" before it: XLA compiles the step.
VICTIMS are ranks with commas between, DELAY is in seconds. Under `mpirun --with-ft ulfm`. Each rank that is left prints
its former rank, and the times in seconds from the kill to the error, and to the end of the next step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

import mpistrat
from mpistrat.api import runtime
from mpistrat.api.elastic import recover
from mpistrat.core.errors import RanksLostError


def eager() -> Callable[[], float]:
    """All-reduces of arrays of all sizes, one after the other."""
    sizes = np.random.default_rng(0).integers(1, 300_000, 50)
    turn = 0

    def step() -> float:
        nonlocal turn
        size, turn = int(sizes[turn % len(sizes)]), turn + 1
        return float(mpistrat.allreduce(np.full(size, 2.0 ** RANK, np.float32), op=mpistrat.Sum)[-1])

    def restart() -> None:  # Some ranks have completed one step more than others.
        nonlocal turn
        turn = 0
    step.restart = restart  # type: ignore[attr-defined]
    return step


def negotiated() -> Callable[[], float]:
    """Several all-reduces in flight, which no vote is for."""
    def step() -> float:
        handles = [mpistrat.allreduce_async(np.full(1000 * i + 1, 2.0 ** RANK), op=mpistrat.Sum, name=f"t{i}")
                   for i in range(5)]
        results = [float(handle.wait()[0]) for handle in handles]
        assert len(set(results)) == 1, results
        return results[0]
    return step


def gathered() -> Callable[[], float]:
    def step() -> float:
        mpistrat.broadcast(np.ones(100_000), 0)
        mpistrat.allgather_object(RANK)
        return float(mpistrat.allgather(np.full((3, 1000), 2.0 ** RANK))[::3].sum() / 1000)
    return step


def sets() -> Callable[[], float]:
    """All-reduces in two process sets that overlap, and among all ranks. It needs four ranks, of which 1 is left."""
    made = [mpistrat.add_process_set([0, 1, 2]), mpistrat.add_process_set([1, 3]), mpistrat.add_process_set([0])]

    def step() -> float:
        for each in made:
            if each.included():
                mpistrat.allreduce(np.full(1000, 2.0 ** RANK), op=mpistrat.Sum, process_set=each)
        return float(mpistrat.allreduce(np.full(10, 2.0 ** RANK), op=mpistrat.Sum)[0])

    def check() -> None:
        left = mpistrat.allgather_object(RANK)
        for each, ranks in zip(made, ((0, 1, 2), (1, 3), (0,)), strict=True):
            members = [left.index(rank) for rank in ranks if rank in left]
            if not members:
                assert each.process_set_id is None, each
                continue
            assert each.ranks == members, (each, members)
            if each.included():
                total, = mpistrat.allreduce(np.array([2.0 ** RANK]), op=mpistrat.Sum, process_set=each)
                assert total == sum(2.0 ** rank for rank in ranks if rank in left), (each, total)
        assert mpistrat.remove_process_set(made[1])
    step.check = check  # type: ignore[attr-defined]
    return step


def joined() -> Callable[[], float]:
    """The last rank waits in join() while the others reduce."""
    is_joined = [False]

    def step() -> float:
        if not is_joined[0] and mpistrat.rank() == mpistrat.size() - 1:
            is_joined[0] = True
            mpistrat.join()
        return float(mpistrat.allreduce(np.full(1000, 2.0 ** RANK), op=mpistrat.Sum, name="joined")[0])
    return step


def session() -> Callable[[], float]:
    import tensorflow as tf

    import mpistrat.tensorflow as hvd
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        weights = v1.placeholder_with_default(tf.ones([1000]), [1000])
        gradient, = tf.gradients(hvd.allreduce(weights * 2.0 ** RANK, op=hvd.Sum)[:1], weights)
        mean = hvd.allreduce(tf.fill([300_000], 2.0 ** RANK))
        total = hvd.allreduce(tf.constant(2.0 ** RANK), op=hvd.Sum)
        fetched = [total, mean[0], gradient, hvd.allgather(tf.fill([3], 1.0))]
        opened = v1.Session()

    def step() -> float:
        total, mean, *_ = opened.run(fetched)
        assert np.isclose(mean * mpistrat.size(), total), (mean, total)
        return float(total)
    return step


def function() -> Callable[[], float]:
    import tensorflow as tf

    import mpistrat.tensorflow as hvd
    weights = tf.Variable(tf.ones([1000]))

    def made() -> Callable[[], tf.Tensor]:
        @tf.function(jit_compile=IS_COMPILED or None)
        def training_step() -> tf.Tensor:
            with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
                loss = tf.reduce_sum(weights) * 2.0 ** RANK
            gradient, = tape.gradient(loss, [weights])
            mean = hvd.allreduce(tf.fill([300_000], 2.0 ** RANK))
            with tf.control_dependencies([hvd.allgather(tf.fill([3], 1.0)), mean]):
                return tf.stack([gradient[0], mean[0]])
        return training_step

    training_step = made()

    def step() -> float:
        total, mean = training_step().numpy()
        assert np.isclose(mean * mpistrat.size(), total), (mean, total)
        return float(total)

    def restart() -> None:
        nonlocal training_step
        if not IS_COMPILED:
            return
        try:
            training_step()
        except tf.errors.InvalidArgumentError as error:
            assert f"compiled this collective for {SIZE} ranks, but there are {mpistrat.size()}" in str(error), error
        else:
            raise AssertionError("a result has the shape of another number of ranks")
        training_step = made()
    step.restart = restart  # type: ignore[attr-defined]
    return step


def fit() -> Callable[[], float]:
    import keras

    import mpistrat.keras as hvd
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Embedding(50, 4), keras.layers.Flatten(),
                              keras.layers.Dense(16), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001)), "mse", jit_compile=IS_COMPILED)
    x = np.random.default_rng(RANK).integers(0, 50, (64, 8))

    def step() -> float:
        model.fit(x, x[:, :1] / 50, epochs=1, batch_size=8, verbose=0)
        return float(mpistrat.allreduce(np.array([2.0 ** RANK]), op=mpistrat.Sum)[0])

    def check() -> None:
        import mpistrat.tensorflow
        mpistrat.tensorflow.broadcast_variables(model.variables, 0)
        model.optimizer.build(model.trainable_variables)
        mpistrat.tensorflow.broadcast_variables(model.optimizer.variables, 0)
        step()
        everywhere = mpistrat.allgather_object([w.tobytes() for w in model.get_weights()])
        assert all(each == everywhere[0] for each in everywhere)
    step.check = check  # type: ignore[attr-defined]
    return step


def strategy() -> Callable[[], float]:
    """Keras' fit under MPIStrategy. After the loss the gradients are those of the ranks that are left."""
    import keras
    import tensorflow as tf

    import mpistrat.tensorflow
    under = mpistrat.tensorflow.MPIStrategy()
    with under.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=IS_COMPILED)
    x = np.random.default_rng(1).standard_normal((48, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(24)

    def step() -> float:
        model.fit(data, epochs=1, verbose=0)
        return float(mpistrat.allreduce(np.array([2.0 ** RANK]), op=mpistrat.Sum)[0])

    def check() -> None:
        assert under.num_replicas_in_sync == mpistrat.size(), under.num_replicas_in_sync
        # One step of the old model, whose step was traced for more ranks, and of one that knows only those left.
        mpistrat.tensorflow.broadcast_variables(model.variables, 0)
        with under.scope():
            other = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
            other.compile(keras.optimizers.SGD(0.01), "mse", jit_compile=IS_COMPILED)
        other.set_weights(model.get_weights())
        step()
        other.fit(data, epochs=1, verbose=0)
        for a, b in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
    step.check = check  # type: ignore[attr-defined]
    return step


def recovery() -> Callable[[], float]:
    """As eager; the second victim is killed during the recovery."""
    return eager()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


KIND, VICTIMS, DELAY_S = sys.argv[1], [int(rank) for rank in sys.argv[2].split(",")], float(sys.argv[3])
SECOND_S = 0.004  # from the first loss to the second one, in the recovery
IS_COMPILED = KIND.startswith("compiled_")
mpistrat.init()
RANK, SIZE = mpistrat.rank(), mpistrat.size()
assert runtime.current().losses.is_tolerant
step = globals()[KIND.removeprefix("compiled_")]()
if KIND != "joined":
    for _ in range(2):
        assert step() == 2.0 ** SIZE - 1
KILLED_AT = float(mpistrat.broadcast(np.array([time.time() + DELAY_S]), 0)[0])
is_second = KIND == "recovery" and RANK in VICTIMS[1:]
if RANK in VICTIMS and not is_second:
    threading.Timer(max(KILLED_AT - time.time(), 0.0), die).start()
noticed_s, lost, total = 0.0, set(), 0.0
while mpistrat.size() > SIZE - len(VICTIMS):
    try:
        while True:
            step()
    except RanksLostError as error:
        noticed_s, lost = noticed_s or time.time() - KILLED_AT, lost | {each.rank for each in error.lost}
    if is_second:
        threading.Timer(SECOND_S, die).start()
    recover()
    if hasattr(step, "restart"):
        step.restart()
    if mpistrat.size() == SIZE - len(VICTIMS):
        total = step()
went_on_s = time.time() - KILLED_AT
left = mpistrat.allgather_object(RANK)
assert left == [rank for rank in range(SIZE) if rank not in VICTIMS], left
assert (mpistrat.rank(), mpistrat.size()) == (left.index(RANK), len(left))
assert KIND == "joined" or total == sum(2.0 ** rank for rank in left), total
assert lost, "the error names no rank"
if hasattr(step, "check"):
    step.check()
for _ in range(3):
    step()
print(f"rank {RANK}: went on as rank {mpistrat.rank()} of {mpistrat.size()}; noticed after {noticed_s:.3f} s, next "
      f"step after {went_on_s:.3f} s", flush=True)
