"""Checks TensorFlow's tensors on a GPU, on one rank or on several. All checks run, even if some fail.

    python -m tests.gpu.tensorflow_checks [controls]
    mpistrat run -np 2 -- python -m tests.gpu.tensorflow_checks

`controls` runs only the controls, which must refute a stream that TensorFlow does not use. The controls also print how
often an event was done when it was recorded, because such a race proves nothing. Rank 0 prints a line for each
check, with the ranks on which it failed. With --stand-in the program runs without a GPU, to show that it works.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# A check that fails on one rank leaves the others waiting for this long.
os.environ.update({"MPISTRAT_STALL_CHECK_TIME_SECONDS": "5", "MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS": "10"})
os.environ.setdefault("MPISTRAT_LOG_LEVEL", "info")

import numpy as np
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd
from mpistrat.api import runtime
from mpistrat.gpu.proof import RefutedError, UnprovenError
from mpistrat.tensorflow.async_op import call_site, kernel, streams
from mpistrat.tensorflow.bridge import gpu_device
from mpistrat.tensorflow.xla import ffi
from tests.gpu.counted import say_events

IS_STAND_IN = "--stand-in" in sys.argv
DEVICE = "/device:CPU:0" if IS_STAND_IN else "/device:GPU:0"
BUCKETS, BUCKET_MB = (3, 1) if IS_STAND_IN else (13, 32)  # as many as BERT-base has


say_events(streams)


def start() -> None:
    """Call init(). With the stand-in, TensorFlow's CPU tensors then take the path of GPU tensors."""
    hvd.init()
    if IS_STAND_IN:
        from tests.support import tensorflow_stand_in
        tensorflow_stand_in.install(mpistrat.rank())


def same(result: Any, expected: Any) -> None:
    """Raise AssertionError if the two differ by more than rounding."""
    np.testing.assert_allclose(np.asarray(result), np.asarray(expected), rtol=1e-5, atol=1e-5)


# -- the asynchronous operation ---------------------------------------------------------------------------------------


def tensorflow_has_the_operation() -> None:
    """The operation can be used. It gets the address of a GPU tensor without waiting for the contents."""
    assert not kernel.why_not(), kernel.why_not()
    tensor = tf.random.normal([64, 64] if IS_STAND_IN else [4096, 4096])
    for _ in range(40):
        tensor = tensor @ tensor * 1e-2
    began = time.monotonic()
    address, = kernel.lent([tensor], ()).sources
    looked = time.monotonic()
    tensor.numpy()
    print(f"    the address {address:#x} after {(looked - began) * 1e3:.2f} ms, the contents after "
          f"{(time.monotonic() - began) * 1e3:.2f} ms")


def each_way_to_tensorflows_stream() -> None:
    """Print a line for each way to TensorFlow's stream: proved, unproven or refuted. At least one must be proved."""
    device = gpu_device.device_at(DEVICE)
    works = []
    for name in ("ContextStream", "stream_of_handler"):
        way = getattr(streams, name)
        try:
            with device.current():
                stream = way(device, DEVICE)
                for _ in range(5):
                    streams.check(stream, device, DEVICE)
            works.append(name)
            print(f"    {name}: proved")
        except UnprovenError as error:
            print(f"    {name}: unproven, {error}")
        except Exception as error:
            print(f"    {name}: refuted, {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    assert works, "no way works, so tensors are reduced through the host"
    streams.stream_for(device, DEVICE)  # Chooses one, as the first collective does.


def foreign_streams_are_refuted() -> None:
    """The checks of streams must refute a stream that TensorFlow does not use. Otherwise they would mean nothing."""
    device = gpu_device.device_at(DEVICE)
    for check in (streams.check, streams.check_waiting):
        if IS_STAND_IN:
            break  # TensorFlow's work on the host is over before a check begins.
        try:
            with device.current():
                check(device.stream(), device, DEVICE)
        except RefutedError as error:
            print(f"    {check.__name__}: {error}")
            continue
        raise AssertionError(f"{check.__name__} has taken a foreign stream for TensorFlow's")


def tensorflows_stream_waits_for_the_engines() -> None:
    """TensorFlow reads what a late copy by the engine has written, 50 times. The host does not wait.

    The first time is cold.
    """
    if ffi.api() is None:
        return
    device = gpu_device.device_at(DEVICE)
    with device.current():
        stream = streams.stream_of_handler(device, DEVICE)
        for _ in range(3 if IS_STAND_IN else 50):
            streams.check_waiting(stream, device, DEVICE)


def tensors_are_handed_over_by_the_operation() -> None:
    """Collectives take tensors by the asynchronous operation, and not through the host."""
    assert call_site.are_on_gpu([tf.ones([3])])


# -- without a collective ---------------------------------------------------------------------------------------------


def tensors_are_on_the_gpu() -> None:
    """TensorFlow has a GPU, and the engine uses the same GPU."""
    tensor = tf.ones([3])
    assert DEVICE in tensor.backing_device, tensor.backing_device
    assert call_site.are_on_gpu([tensor])
    print(f"    {gpu_device.device_at(tensor.backing_device).identity}, of {tf.config.list_physical_devices()}")


# -- collectives ------------------------------------------------------------------------------------------------------


def a_sum_of_eager_tensors() -> None:
    rank, size = mpistrat.rank(), mpistrat.size()
    same(hvd.allreduce(tf.fill([5], float(rank)), op=hvd.Sum), np.full(5, sum(range(size))))
    same(hvd.allgather(tf.fill([rank + 1, 2], float(rank))), [[r, r] for r in range(size) for _ in range(r + 1)])
    same(hvd.broadcast(tf.fill([2], float(rank)), size - 1), [size - 1] * 2)


def a_sum_in_a_graph() -> None:
    """The tensors stay on the GPU, and the sum is read only when it is complete; 50 steps."""
    assert IS_STAND_IN or _device_in_a_graph() == DEVICE

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return 2 * hvd.allreduce(tensor + 1, op=hvd.Sum, name="sum")

    for number in range(50):
        same(step(tf.fill([100_000], float(mpistrat.rank() + number))),
             np.full(100_000, 2 * (sum(range(mpistrat.size())) + mpistrat.size() * (number + 1))))


def a_sum_that_xla_has_compiled() -> None:
    """A sum, gathered rows and the maximum of an integer, in one compiled function; 50 steps."""
    rank, size = mpistrat.rank(), mpistrat.size()

    @tf.function(jit_compile=True)
    def step(tensor: tf.Tensor, number: tf.Tensor) -> list[tf.Tensor]:
        total = hvd.allreduce(tf.sin(tensor) + 1, op=hvd.Sum, name="sum")
        return [2 * total, hvd.allgather(tensor[:2], name="rows"), hvd.allreduce(number, op=hvd.Max, name="number")]

    for number in range(50):
        total, rows, most = step(tf.fill([100_000], float(rank + number)), tf.constant(rank + number))
        same(total, np.full(100_000, 2 * sum(np.sin(r + number) + 1 for r in range(size))))
        same(rows, np.repeat(np.arange(size) + number, 2))
        same(most, size - 1 + number)


def no_node_reads_a_result_too_early() -> None:
    """TensorFlow's graph optimizer moves nodes before a reshape. Checks reshapes, casts and gradients of results."""
    rank, size = mpistrat.rank(), mpistrat.size()

    @tf.function
    def step(values: tf.Tensor) -> list[tf.Tensor]:
        first = hvd.allreduce(values + 1, op=hvd.Sum, name="first")
        second = hvd.allreduce(values + 1, op=hvd.Sum, name="second")
        with tf.GradientTape() as tape:
            tape.watch(values)
            third = hvd.allreduce(tf.reduce_sum(values * values, axis=0), op=hvd.Sum, name="third")
            total = tf.reduce_sum(third)
        return [tf.reshape(-first, [-1]), tf.cast(second, tf.float16), tape.gradient(total, values),
                tf.concat([tf.reshape(first, [-1]), tf.reshape(second, [-1])], axis=0)]

    for number in range(20):
        values = np.arange(6.0).reshape(2, 3) + rank + number
        reduced = np.sum([np.arange(6.0).reshape(2, 3) + r + number + 1 for r in range(size)], axis=0)
        negated, halves, gradient, flat = step(tf.constant(values, tf.float32))
        same(negated, -reduced.reshape(-1))
        same(halves, reduced.astype(np.float16))
        same(gradient, 2 * values * size)
        same(flat, np.concatenate([reduced.reshape(-1)] * 2))


def sync_batch_normalization_has_the_gradient_of_the_host() -> None:
    """The gradient with respect to the input is the same, within rounding, as on the CPU."""
    import mpistrat.keras as hvd_keras
    layer = hvd_keras.SyncBatchNormalization()
    layer.build([None, 5])
    values = tf.constant(np.random.RandomState(mpistrat.rank()).randn(8, 5), tf.float32)
    weights = tf.constant(np.random.RandomState(9).randn(8, 5), tf.float32)

    def gradient(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = tf.reduce_sum(weights * tf.square(layer(values, training=True)))
        return tape.gradient(result, values)

    with tf.device("/device:CPU:0"):
        expected = tf.function(gradient)(values)
    step = tf.function(gradient)
    for _ in range(10):
        np.testing.assert_allclose(step(values).numpy(), expected.numpy(), atol=1e-4)


def rows_that_repeat_are_added_in_one_order() -> None:
    """All ranks and runs get the same bits for repeated rows. Two optimizers add slices, and one makes them dense."""
    import keras

    import mpistrat.keras as hvd_keras
    rows, width, most = (64, 2, 5) if IS_STAND_IN else (20_480, 64, 500)
    for make in (lambda: keras.optimizers.SGD(0.1), lambda: keras.optimizers.Adagrad(0.1),
                 lambda: keras.optimizers.Adam(0.1)):
        found = set()
        for _ in range(2 if IS_STAND_IN else 4):
            table = tf.Variable(tf.zeros([most, width]))
            optimizer = hvd_keras.DistributedOptimizer(make())
            optimizer.build([table])
            random = np.random.default_rng(mpistrat.rank())
            values, indices = random.normal(size=(rows, width)), random.integers(0, most, rows)
            gradient = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(indices),
                                        tf.constant([most, width]))
            step = tf.function(optimizer.apply)
            for _ in range(20):
                step([gradient], [table])
            found.update(mpistrat.allgather_object(table.numpy().tobytes()))
        assert len(found) == 1, f"{optimizer.name}: {len(found)} results of ranks and runs"


def memory_that_is_used_again_has_the_right_numbers() -> None:
    """TensorFlow allocates and fills memory of the same sizes before the GPU has executed the collectives."""
    sizes, size = (1000, 250_000, 7), mpistrat.size()

    @tf.function
    def step(number: tf.Tensor) -> list[tf.Tensor]:
        reduced = hvd.grouped_allreduce([tf.fill([n], number) + 1 for n in sizes], op=hvd.Sum, name="again")
        others = [tf.fill([n], -number) for n in sizes]
        return [tf.reduce_min(each) for each in reduced] + [tf.reduce_max(each) for each in others]

    found = [step(tf.constant(float(number))) for number in range(20 if IS_STAND_IN else 200)]
    for number, values in enumerate(found):
        same(tf.stack(values), [(number + 1) * size] * 3 + [-number] * 3)


def fit_trains_the_same_weights_on_all_ranks() -> None:
    """A DistributedOptimizer trains a small model for 20 steps."""
    _fit(jit_compile=False)


def fit_of_a_compiled_model_trains_the_same_weights_on_all_ranks() -> None:
    _fit(jit_compile=True)


def _fit(jit_compile: bool) -> None:
    import keras

    import mpistrat.keras as hvd_keras
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=jit_compile)
    data = np.random.RandomState(mpistrat.rank()).randn(160, 4).astype(np.float32)
    model.fit(data, data.sum(1), batch_size=8, verbose=0)
    weights = np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
    assert np.isfinite(weights).all()
    for other in mpistrat.allgather_object(weights):
        np.testing.assert_array_equal(other, weights)


def a_step_with_as_many_buckets_as_bert() -> None:
    """Print the time of a step with and without averaging."""
    variables = [tf.Variable(tf.ones([BUCKET_MB * 2**18])) for _ in range(BUCKETS)]

    def step(averages: bool) -> tf.Tensor:
        gradients = [variable * 0.5 for variable in variables]
        if averages:
            gradients = hvd.grouped_allreduce(gradients, name="bert")
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(gradient * 2)
        return tf.reduce_sum(variables[-1])

    took = {}
    for averages in (False, True):
        function = tf.function(step)
        seconds = []
        for _ in range(8):
            began = time.perf_counter()
            function(averages).numpy()
            seconds.append(time.perf_counter() - began)
        took[averages] = np.median(seconds[3:])
    same(variables[0][:3], [1, 1, 1])
    if mpistrat.rank() == 0:
        print(f"    {BUCKETS} buckets of {BUCKET_MB} MB, {mpistrat.size()} ranks: {took[True] * 1e3:.2f} ms a step, "
              f"{took[False] * 1e3:.2f} ms without averaging")


def _device_in_a_graph() -> str | None:
    with tf.Graph().as_default():
        return call_site.device_of([tf.zeros([2])])


CONTROLS: list[Callable[[], None]] = [
    # The first one is cold, as in a training, so nothing may come before it.
    tensorflows_stream_waits_for_the_engines, foreign_streams_are_refuted, each_way_to_tensorflows_stream]
CHECKS: list[Callable[[], None]] = [
    *CONTROLS, tensors_are_on_the_gpu, tensorflow_has_the_operation, tensors_are_handed_over_by_the_operation]
COLLECTIVES: list[Callable[[], None]] = [
    a_sum_of_eager_tensors, a_sum_in_a_graph, no_node_reads_a_result_too_early,
    memory_that_is_used_again_has_the_right_numbers,
    sync_batch_normalization_has_the_gradient_of_the_host, rows_that_repeat_are_added_in_one_order,
    fit_trains_the_same_weights_on_all_ranks,
    a_step_with_as_many_buckets_as_bert]
COMPILED: list[Callable[[], None]] = [] if ffi.api() is None else [  # TensorFlow before 2.21 has no interface for it.
    a_sum_that_xla_has_compiled, fit_of_a_compiled_model_trains_the_same_weights_on_all_ranks]


def main(checks: list[Callable[[], None]]) -> int:
    """Run `checks`, and then the checks of collectives. Return how many checks have failed on some rank."""
    return run(checks + COLLECTIVES + COMPILED)


def run(checks: list[Callable[[], None]], suffix: str = "") -> int:
    """Run these checks between init() and shutdown(). After a failure connect again. Return how many have failed."""
    failed = 0
    start()
    rank, size = mpistrat.rank(), mpistrat.size()
    for check in checks:
        name, began, problem = check.__name__.replace("_", " ") + suffix, time.monotonic(), ""
        try:
            check()
        except Exception as error:
            traceback.print_exc()
            problem = f"FAILED on rank {rank}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        problems = [text for text in _of_all_ranks(problem, size) if text]
        if rank == 0:
            print(f"== {name}: {'; '.join(problems) or 'passed'} ({time.monotonic() - began:.1f} s)", flush=True)
        if problems:
            failed += 1
            mpistrat.shutdown()
            start()
    print(f"chosen on rank {rank}: {'; '.join(chosen()) or 'nothing, for no tensor was on the GPU'}", flush=True)
    mpistrat.shutdown()
    return failed


def chosen() -> list[str]:
    """Return the findings of the engine, and how it records events in TensorFlow's stream on each GPU."""
    found = list(runtime.group_of("chosen", 0).engine.controller.executor.device.findings)
    for where, (way, _) in streams._found.get(runtime.current(), {}).items():
        text = "through the host" if way is None else "an event of the context, the host waits for results" \
            if type(way.stream).__name__ == "ContextStream" else "its own, proved, " + (
                "the host waits for results" if way.reader is None else "which waits for results (proved)")
        found += [f"TensorFlow's stream on {where}: {text}"] if where.startswith("/device:") else []
    return found


def _of_all_ranks(problem: str, size: int) -> list[str]:
    """Return the `problem` of each rank. Calls MPI directly, because the engine of a rank may have ended."""
    if size == 1:
        return [problem]
    from mpi4py import MPI
    return list(MPI.COMM_WORLD.allgather(problem))


if __name__ == "__main__":
    sys.exit(bool(run(CONTROLS) if "controls" in sys.argv else main(CHECKS)))
