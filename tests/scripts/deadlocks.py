"""Programs in which all ranks wait for each other, and programs that only look like that. Each says what came of it.

usage: deadlocks.py arrays|tensorflow

The first cases are deadlocks. The others are legal. In most of them, all ranks have something in flight for SLOW_S,
which is shorter than MPISTRAT_DEADLOCK_S is then. In PATIENT some rank has nothing in flight for longer than that.
"""

import functools
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from reporting import attempt, say

import mpistrat as ms

SLOW_S = 0.5
SHORT_S, LONG_S = "1", "60"  # MPISTRAT_DEADLOCK_S
PATIENT_S = 2.5


def total(name: str) -> float:
    """A sum over all ranks of 1."""
    return float(ms.allreduce(np.float64(1), name=name, op=ms.Sum))


def start(name: str) -> ms.AsyncResult:
    return ms.allreduce_async(np.float64(1), name=name, op=ms.Sum)


def own(*values: object) -> object:
    """The value of this rank; the last one is for all other ranks."""
    return values[min(ms.rank(), len(values) - 1)]


def own_order(*names: str) -> tuple[str, ...]:
    """The names, in another order on odd ranks."""
    return names[::-1] if ms.rank() % 2 else names


# -- deadlocks --------------------------------------------------------------------------------------------------------


def crossed_names() -> float:
    return total(str(own("left", "right")))


def crossed_names_with_idle_threads() -> float:
    """Threads that wait for work make no difference."""
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(abs, (-1, -2))) == [1, 2]
        threading.Thread(target=queue.Queue().get, daemon=True).start()
        return total(str(own("left", "right")))


def crossed_handles() -> float:
    """Each rank waits for what it has started before."""
    return float(start(str(own("left", "right"))).wait())


# -- no deadlocks -----------------------------------------------------------------------------------------------------


def late(work: Callable[[], None]) -> float:
    """Rank 0 starts one operation and works before the other one. The other ranks do both the other way round."""
    if ms.rank() == 0:
        early = start("early")
        work()
        return total("late") + float(early.wait())
    return total("late") + total("early")


def a_rank_that_sleeps() -> float:
    """The others wait meanwhile."""
    return late(lambda: time.sleep(SLOW_S))


def a_rank_with_nothing_in_flight() -> float:
    """The others wait for it."""
    if ms.rank() == 0:
        time.sleep(PATIENT_S)
    return total("early") + total("late")


def orders_of_their_own() -> float:
    """Each rank starts one operation, sleeps, and starts the other."""
    first, second = own_order("left", "right")
    handle = start(first)
    time.sleep(SLOW_S)
    return total(second) + float(handle.wait())


def _with_a_thread(wait: Callable[[], object]) -> float:
    first, second = own_order("left", "right")
    results: list[float] = []

    def supply() -> None:
        wait()
        results.append(total(second))

    thread = threading.Thread(target=supply)
    thread.start()
    result = total(first)
    thread.join()
    return result + results[0]


def a_thread_that_sleeps_first() -> float:
    """It supplies what other ranks wait for."""
    return _with_a_thread(lambda: time.sleep(SLOW_S))


def a_thread_that_waits_with_a_limit_first() -> float:
    return _with_a_thread(lambda: threading.Event().wait(SLOW_S))


def a_thread_that_reads_first() -> float:
    """From a process that writes late."""
    with subprocess.Popen(["sh", "-c", f"sleep {SLOW_S}; echo x"], stdout=subprocess.PIPE) as process:
        return _with_a_thread(process.stdout.read)  # type: ignore[union-attr]


def ranks_that_have_ended_and_one_that_works() -> str:
    """Evaluation on rank 0 only: the other ranks wait in shutdown()."""
    if ms.rank() == 0:
        time.sleep(PATIENT_S)
    ms.shutdown()
    return "shut down"


DEADLOCKS = ("crossed_names", "crossed_names_with_idle_threads", "crossed_handles", "uneven_parts_of_the_data",
             "a_graph_and_an_eager_call", "compiled_functions_of_other_orders",
             "runs_of_other_orders", "a_graph_with_one_collective_more")
PATIENT = ("a_rank_with_nothing_in_flight", "ranks_that_have_ended_and_one_that_works", "evaluation_on_rank_0_only")
ARRAYS = [crossed_names, crossed_names_with_idle_threads, crossed_handles, a_rank_that_sleeps,
          a_rank_with_nothing_in_flight, orders_of_their_own, a_thread_that_sleeps_first,
          a_thread_that_waits_with_a_limit_first, a_thread_that_reads_first, ranks_that_have_ended_and_one_that_works]


def tensorflow_cases() -> list[Callable[[], object]]:
    """The cases with TensorFlow, which is imported only here."""
    import keras
    import tensorflow as tf

    import mpistrat.keras as hvd
    from mpistrat.tensorflow.xla import ffi

    @tf.autograph.experimental.do_not_convert
    def graph_total(value: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allreduce(value, op=hvd.Sum, name=name)

    def uneven_parts_of_the_data() -> None:
        """A step more on all ranks but rank 0, which averages its metrics meanwhile."""
        rows = 32 if hvd.rank() == 0 else 48
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
        model.fit(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=16, epochs=2, verbose=0,
                  callbacks=[hvd.callbacks.MetricAverageCallback()])

    def a_graph_and_an_eager_call() -> float:
        """In a graph on rank 0, eager on the others."""
        if hvd.rank() == 0:
            return float(tf.function(lambda: graph_total(tf.ones([]), "in_a_graph"))())
        return total("eager")

    def compiled_functions_of_other_orders() -> list[float]:
        """XLA has compiled them, if it can."""
        return [float(tf.function(functools.partial(graph_total, name=name), jit_compile=ffi.api() is not None)(
            tf.ones([]))) for name in own_order("left", "right")]

    def runs_of_other_orders() -> list[float]:
        """Of one graph, in sessions."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            sums = {name: graph_total(tf.ones([]), name) for name in ("left", "right")}
            return [float(session.run(sums[name])) for name in own_order("left", "right")]

    def a_graph_with_one_collective_more() -> float:
        """On rank 0, of the same kind and shape as the others. Each rank runs as many."""
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            mine = ("extra", "wanted") if hvd.rank() == 0 else ("wanted", "next")
            return float(sum(session.run([hvd.allreduce(tf.ones([], name=name)) for name in mine])))

    def crossed(slow: Callable[[], tf.Tensor]) -> float:
        """In a graph on even ranks, with something slow before the second collective. Odd ranks begin with that."""
        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            return graph_total(tf.ones([]), "left") + graph_total(tf.ones([]) + 0.0 * slow(), "right")

        if hvd.rank() % 2 == 0:
            return float(step())
        return float(graph_total(tf.ones([]), "right")) + float(graph_total(tf.ones([]), "left"))

    def a_graph_that_computes() -> float:
        """Without calling Python."""
        def slow() -> tf.Tensor:
            end = tf.timestamp() + SLOW_S
            return tf.cast(tf.while_loop(lambda now: now < end, lambda _: [tf.timestamp()], [tf.timestamp()])[0],
                           tf.float32)
        return crossed(slow)

    def a_graph_that_waits_for_a_file() -> float:
        """A pipe with a name, which a process opens late."""
        def slow() -> tf.Tensor:
            with tf.control_dependencies([tf.io.write_file(path, "x")]):
                return tf.ones([])

        with tempfile.TemporaryDirectory() as directory:
            path = f"{directory}/pipe"
            os.mkfifo(path)
            # With a time limit, since odd ranks write nothing.
            with subprocess.Popen(["timeout", f"{2 * SLOW_S}", "sh", "-c", f"sleep {SLOW_S}; cat {path} > /dev/null"]):
                return crossed(slow)

    def a_graph_that_calls_python() -> float:
        """Which sleeps."""
        def sleep() -> np.float32:
            time.sleep(SLOW_S)
            return np.float32(1)
        return crossed(lambda: tf.numpy_function(sleep, [], tf.float32))

    def a_graph_that_reads_data() -> float:
        """From a generator that sleeps."""
        def rows() -> Iterator[float]:
            time.sleep(SLOW_S)
            yield 1.0
        data = iter(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([])).prefetch(1))
        return crossed(lambda: next(data))

    def graphs_of_other_orders() -> float:
        """With something slow in between that the threads of a process do not show: a pipeline that sleeps."""
        first, second = own_order("left", "right")
        data = tf.raw_ops.SleepDataset(
            input_dataset=tf.data.Dataset.from_tensors(1.0)._variant_tensor, sleep_microseconds=int(SLOW_S * 1e6),
            output_types=[tf.float32], output_shapes=[[]])

        @tf.function(autograph=False)
        def step() -> tf.Tensor:
            sum_ = graph_total(tf.ones([]), first)
            slow, = tf.raw_ops.DatasetToSingleElement(dataset=data, output_types=[tf.float32], output_shapes=[[]])
            return sum_ + graph_total(slow, second)

        return float(step())

    def evaluation_on_rank_0_only() -> float:
        """By graphs, while the others wait and it has nothing in flight."""
        def evaluate() -> None:
            model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            end = time.monotonic() + PATIENT_S
            while time.monotonic() < end:
                model.evaluate(np.ones((64, 3)), np.ones((64, 1)), verbose=0)
        if ms.rank() == 0:
            evaluate()
        return total("late") + total("early")

    return [uneven_parts_of_the_data, a_graph_and_an_eager_call, compiled_functions_of_other_orders,
            runs_of_other_orders, a_graph_with_one_collective_more, a_graph_that_computes,
            a_graph_that_waits_for_a_file, a_graph_that_calls_python, a_graph_that_reads_data, graphs_of_other_orders,
            evaluation_on_rank_0_only]


def main() -> None:
    """One case after the other, each between init() and shutdown()."""
    for case in ARRAYS if sys.argv[1] == "arrays" else tensorflow_cases():
        os.environ["MPISTRAT_DEADLOCK_S"] = SHORT_S if case.__name__ in (*DEADLOCKS, *PATIENT) else LONG_S
        ms.init()
        ms.barrier()
        say(case.__name__)
        attempt(case)
        ms.shutdown()
    say("ends")


if __name__ == "__main__":
    main()
