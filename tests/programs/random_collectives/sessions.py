"""Programs in graphs and sessions of tf.compat.v1.

Each graph has reductions, gathers and broadcasts, in branches, loops whose iterations overlap, and functions that are
called at several places. A program has several graphs, with the control flow of TensorFlow 1 or 2, some of them in
threads of their own; its runs fetch results in another order on each rank.
"""

import random
import threading
from collections.abc import Callable

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd

from .pieces import WIDTH, Graphs, Piece, World, drawn, rows

v1 = tf.compat.v1
RESULTS, RUNS = 4, 2
KINDS = ("sum", "largest", "weighted", "gather", "grouped", "broadcast", *("branch", "loop", "parallel", "call",
                                                                           "call twice") * 2)


class InSession(Graphs):
    def name(self, name: str) -> None:
        return None

    def function(self, piece: Piece) -> Callable[[tf.Tensor], tf.Tensor]:
        # A loop of TensorFlow 1's control flow refuses a function.
        return super().function(piece) if v1.control_flow_v2_enabled() else lambda x: self.graph(piece.inner, x)


def check_graph(number: int, place: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    chooser, own = random.Random(f"{number}/{place}"), random.Random(f"{number}/{place}/{rank}")
    programs = [drawn(chooser, KINDS, 2) for _ in range(RESULTS)]
    config = v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        x = v1.placeholder(tf.float32, [WIDTH])
        graphs = InSession()
        results = [graphs.graph(whole, x) for whole in programs]
        for run in range(RUNS):
            given = np.random.default_rng([number, place, run]).integers(0, 17, [size, WIDTH]).astype(np.float32)
            chosen = chooser.sample(range(RESULTS), chooser.randint(1, RESULTS))
            own.shuffle(chosen)
            found = session.run([results[i] for i in chosen], {x: given[rank]})
            for i, result in zip(chosen, found, strict=True):
                expected, _ = rows(programs[i], given.astype(np.float64), World(range(size)))
                np.testing.assert_array_equal(result, expected[rank],
                                              err_msg=f"program {number}, graph {place}, result {i}, run {run}")


def run(number: int, options: frozenset[str]) -> None:
    chooser = random.Random(number)
    (v1.enable_control_flow_v2 if chooser.random() < 0.5 else v1.disable_control_flow_v2)()
    try:
        check_graphs(number, 1 if chooser.random() < 0.5 else 3)
    finally:
        v1.enable_control_flow_v2()


def check_graphs(number: int, count: int) -> None:
    if count == 1:
        check_graph(number, 0)
        return
    failed: list[BaseException] = []

    def guarded(place: int) -> None:
        try:
            check_graph(number, place)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(place,), name=f"graph {'abc'[place]}") for place in range(count)]
    random.Random(hvd.rank()).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
