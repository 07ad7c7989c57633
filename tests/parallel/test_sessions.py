"""Collectives in graphs that a session of tf.compat.v1 runs, with both control flows and both kinds of variables."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
import mpistrat.tensorflow as hvd

from ..support.levels import sample
from .helpers import assert_equal_on_all_ranks, everywhere

v1 = tf.compat.v1


@pytest.fixture(params=["v1", pytest.param("v2", marks=pytest.mark.nightly)], autouse=True)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """The control flow and the variables of TensorFlow 2 in a graph, or those of TensorFlow 1."""
    if request.param == "v1":
        v1.disable_control_flow_v2()
        v1.disable_resource_variables()
    yield request.param
    if request.param == "v1":
        v1.enable_control_flow_v2()
        v1.enable_resource_variables()


both_modes = pytest.mark.parametrize("mode", ["v1", "v2"], indirect=True)


@pytest.fixture
def session() -> Iterator[Any]:
    with tf.Graph().as_default(), v1.Session() as opened:
        yield opened


def initialized(session: Any) -> Any:
    session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
    return session


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.horovod("session-collectives")
@pytest.mark.parametrize("elements", [3, 40_000])
def test_reductions_of_each_kind(elements: int, session: Any, rank: int, size: int) -> None:
    own = np.arange(elements, dtype=np.float32) + rank
    each = [np.arange(elements, dtype=np.float32) + other for other in range(size)]
    x = v1.placeholder(tf.float32, [elements])
    results = {op: hvd.allreduce(x, op=getattr(hvd, op)) for op in ("Sum", "Average", "Min", "Max")}
    results["fp16"] = hvd.allreduce(tf.ones([elements]) * (rank + 1), op=hvd.Sum, compression=hvd.Compression.fp16)
    found = session.run(results, {x: own})
    for op, expected in (("Sum", sum(each)), ("Min", each[0]), ("Max", each[-1])):
        np.testing.assert_array_equal(found[op], expected)
    np.testing.assert_allclose(found["Average"], sum(each) / size, rtol=1e-6)
    np.testing.assert_array_equal(found["fp16"], np.full(elements, size * (size + 1) / 2))
    assert_equal_on_all_ranks([found["Average"]])


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int32", "int64", "uint8", "bool"])
def test_dtypes_and_shapes(dtype: str, session: Any, rank: int, size: int) -> None:
    values = [tf.cast(tf.fill(shape, 1), dtype) for shape in ([], [0, 3], [2, 1])]
    op = hvd.Max if dtype == "bool" else hvd.Sum
    for value, found in zip(values, session.run(hvd.grouped_allreduce(values, op=op)), strict=True):
        assert found.shape == tuple(value.shape) and found.dtype == value.dtype.as_numpy_dtype
        assert (found == (1 if dtype == "bool" else size)).all()


def test_gathers_and_scatters(session: Any, rank: int, size: int) -> None:
    gathered = hvd.allgather(tf.fill([rank + 1, 2], rank))
    several = hvd.grouped_allgather([tf.fill([1], rank), tf.fill([rank], 1.0)])
    root = hvd.broadcast(tf.constant(rank + 5.0), size - 1)
    rows, counts = hvd.alltoall(tf.fill([size], rank), splits=[1] * size)
    scattered = hvd.reducescatter(tf.ones([2 * size, 3]), op=hvd.Sum)
    two = hvd.grouped_reducescatter([tf.ones([size]), tf.ones([size, 2])], op=hvd.Sum)
    found = session.run([gathered, several, root, rows, counts, scattered, two])
    assert found[0][:, 0].tolist() == [other for other in range(size) for _ in range(other + 1)]
    assert found[1][0].tolist() == list(range(size)) and found[1][1].shape == (size * (size - 1) // 2,)
    assert found[2] == size + 4
    assert found[3].tolist() == list(range(size)) and found[4].tolist() == [1] * size
    assert found[5].tolist() == [[size] * 3] * 2
    assert [part.shape for part in found[6]] == [(1,), (1, 2)]


def test_slices(session: Any, rank: int, size: int) -> None:
    slices = tf.IndexedSlices(tf.ones([rank + 1, 2]), tf.fill([rank + 1], rank), tf.constant([size, 2]))
    found = session.run(hvd.allreduce(slices, op=hvd.Average))
    assert found.indices.tolist() == [other for other in range(size) for _ in range(other + 1)]
    np.testing.assert_allclose(found.values, np.full((size * (size + 1) // 2, 2), 1 / size))


def test_gradients(session: Any, rank: int, size: int) -> None:
    x = tf.constant([[1.0], [3.0]])

    def of(y: Any) -> Any:
        return tf.gradients(y, x)[0]

    found = session.run({
        "sum": of(hvd.allreduce(x * (rank + 1), op=hvd.Sum)), "gather": of(hvd.allgather(x) * (rank + 1.0)),
        "broadcast": of(hvd.broadcast(x, 0)), "alltoall": of(hvd.alltoall(tf.tile(x, [size, 1]))),
        "scatter": of(hvd.reducescatter(tf.tile(x, [size, 1]), op=hvd.Sum)),
        "second": tf.gradients(of(hvd.allreduce(x, op=hvd.Sum) ** 2), x)[0]})
    np.testing.assert_allclose(found["sum"], np.full((2, 1), size * (rank + 1)))
    np.testing.assert_allclose(found["gather"], np.full((2, 1), (size + 1) / 2))
    np.testing.assert_allclose(found["broadcast"], np.full((2, 1), 1.0 if rank == 0 else 0.0))
    np.testing.assert_allclose(found["alltoall"], np.full((2, 1), size))
    np.testing.assert_allclose(found["second"], np.full((2, 1), 2 * size * size))
    assert found["scatter"].shape == (2, 1)


def test_ranks_and_sizes(session: Any, rank: int, size: int) -> None:
    assert session.run([hvd.rank_op(), hvd.size_op(), hvd.process_set_included_op()]) == [rank, size, 1]
    assert session.run(hvd.join()) in range(size)


def test_process_sets(session: Any, rank: int, size: int) -> None:
    own = hvd.add_process_set([size - 1])
    if own.included():
        assert session.run(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, process_set=own)) == own.size()
        assert session.run(hvd.size_op(own.process_set_id)) == own.size()
    hvd.remove_process_set(own)


# -- order ------------------------------------------------------------------------------------------------------------


def test_many_in_flight_in_another_order_on_each_rank(session: Any, rank: int, size: int) -> None:
    many = [hvd.allreduce(tf.constant(float(i + rank)), op=hvd.Sum) for i in range(60)]
    order = np.random.default_rng(rank).permutation(60)
    for _ in range(3):
        found = session.run([many[i] for i in order])
        assert found == [i * size + size * (size - 1) / 2 for i in order]


def test_only_what_is_asked_for_runs(session: Any, rank: int, size: int) -> None:
    first, second = hvd.allreduce(tf.constant(1.0), op=hvd.Sum), hvd.allreduce(tf.constant(2.0), op=hvd.Sum)
    assert session.run(second) == 2 * size
    assert session.run(first) == size
    assert session.partial_run(session.partial_run_setup([first], []), first) == size
    assert session.make_callable(second)() == 2 * size


@both_modes
@sample("parallel", [10, 1, 100])
def test_iterations_that_overlap(parallel: int, session: Any, rank: int, size: int) -> None:
    """Nothing orders the iterations of the collective: its input does not depend on the one before."""
    def body(i: Any, total: Any) -> Any:
        return i + 1, total + (tf.cast(i, tf.float32) + 1.0) * hvd.allreduce(tf.cast(i + rank, tf.float32), op=hvd.Sum)

    _, total = tf.while_loop(lambda i, _: i < 50, body, [0, 0.0], parallel_iterations=parallel)
    expected = sum((i + 1) * (i * size + size * (size - 1) / 2) for i in range(50))
    assert session.run(total) == expected
    assert session.run(total) == expected


@both_modes
def test_loops_in_loops_and_branches(session: Any, rank: int, size: int) -> None:
    def inner(i: Any) -> Any:
        return tf.while_loop(lambda j, _: j < 3, lambda j, t: (j + 1, t + hvd.allreduce(
            tf.cast(10 * i + j + rank, tf.float32), op=hvd.Sum) * tf.cast(i + 1, tf.float32)), [0, 0.0])[1]

    _, total = tf.while_loop(lambda i, _: i < 4, lambda i, t: (i + 1, t + inner(i)), [0, 0.0])
    more = size * (size - 1) / 2
    assert session.run(total) == sum(((10 * i + j) * size + more) * (i + 1) for i in range(4) for j in range(3))
    flag = v1.placeholder_with_default(True, [])
    branch = tf.cond(flag, lambda: hvd.allreduce(tf.constant(2.0), op=hvd.Sum), lambda: tf.constant(-1.0))
    assert session.run(branch) == 2 * size
    assert session.run(branch, {flag: False}) == -1


@both_modes
def test_the_gradient_of_a_loop(session: Any, rank: int, size: int) -> None:
    x = tf.constant(1.5)
    _, y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, hvd.allreduce(y * x)), [0, tf.constant(1.0)])
    value, slope = session.run([y, tf.gradients(y, x)[0]])
    np.testing.assert_allclose([value, slope], [1.5 ** 3, 3 * 1.5 ** 2])


def test_a_function_that_is_called_twice(session: Any, rank: int, size: int) -> None:
    @tf.function(autograph=False)
    def total(x: Any) -> Any:
        return hvd.allreduce(x, op=hvd.Sum)

    calls = [total(tf.constant(float(i))) for i in range(8)]
    order = list(reversed(range(8))) if rank else list(range(8))
    assert session.run([calls[i] for i in order]) == [i * size for i in order]
    nested = tf.function(lambda x: total(x) + total(2.0 * x), autograph=False)
    assert session.run([nested(tf.constant(1.0)), nested(tf.constant(5.0))]) == [3 * size, 15 * size]


def test_a_function_that_tensorflow_keeps_apart(rank: int, size: int) -> None:
    config = v1.ConfigProto()
    config.graph_options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), autograph=False)
        calls = [total(tf.constant(float(i))) for i in range(8)]
        order = list(reversed(range(8))) if rank else list(range(8))
        for _ in range(3):
            assert session.run([calls[i] for i in order]) == [i * size for i in order]


@both_modes
def test_a_function_in_a_loop(mode: str, session: Any, rank: int, size: int) -> None:
    total = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), autograph=False)

    def body(i: Any, x: Any) -> Any:
        return i + 1, x + tf.cast(i + 1, tf.float32) * total(tf.cast(i, tf.float32))

    if mode == "v1":
        with pytest.raises(ValueError, match="cannot be called in a loop of TensorFlow 1's control flow"):
            tf.while_loop(lambda i, _: i < 20, body, [0, 0.0])
    else:
        _, x = tf.while_loop(lambda i, _: i < 20, body, [0, 0.0])
        assert session.run(x) == sum((i + 1) * i * size for i in range(20))


def test_the_gradient_of_a_function(session: Any, rank: int, size: int) -> None:
    x = tf.constant(2.0)
    square = tf.function(lambda x: hvd.allreduce(x * x * (rank + 1.0), op=hvd.Sum), autograph=False)
    slopes = [tf.gradients(square(x * factor), x)[0] for factor in (1.0, 2.0, 3.0)]
    order = [2, 0, 1] if rank else [0, 1, 2]
    found = session.run([slopes[i] for i in order])
    np.testing.assert_allclose(found, [2 * 2.0 * (i + 1) ** 2 * size * (rank + 1) for i in order])


def test_several_graphs_and_threads(rank: int, size: int) -> None:
    """Each thread has a session of its own; two of them share a graph's session, and run different parts."""
    results: dict[str, list[float]] = {}
    graph = tf.Graph()
    with graph.as_default():
        parts = [hvd.allreduce(tf.constant(float(i)), op=hvd.Sum) for i in range(2)]
    shared = v1.Session(graph=graph)

    def part(number: int) -> None:
        results[f"part{number}"] = [float(shared.run(parts[number])) for _ in range(10)]

    def own(number: int) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            total = hvd.allreduce(tf.constant(10.0 + number), op=hvd.Sum)
            results[f"own{number}"] = [float(session.run(total)) for _ in range(10)]

    threads = [threading.Thread(target=target, args=(number,), name=f"{target.__name__}-{'ab'[number]}")
               for target in (part, own) for number in range(2)]
    for thread in threads[::-1] if rank else threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    shared.close()
    assert results == {"part0": [0.0] * 10, "part1": [size] * 10, "own0": [10.0 * size] * 10,
                       "own1": [11.0 * size] * 10}


def test_two_threads_that_run_one_collective_are_refused(size: int, restart: Callable[[], None]) -> None:
    errors: list[Exception] = []
    with tf.Graph().as_default(), v1.Session() as session:
        begun, go_on = threading.Event(), threading.Event()
        wait = tf.numpy_function(lambda: begun.set() or np.float32(go_on.wait(20)), [], tf.float32)
        total = hvd.allreduce(tf.ensure_shape(wait, []), op=hvd.Sum)

        def run() -> None:
            try:
                session.run(total)
            except (tf.errors.OpError, mpistrat.MpistratError) as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="first")
        thread.start()
        assert begun.wait(20)
        with pytest.raises(mpistrat.InvalidRequestError, match="two threads run one graph with this collective"):
            session.run(total)
        go_on.set()
        thread.join(60)
    assert errors
    restart()


# -- graphs that are copied and deleted -------------------------------------------------------------------------------


def saved_graph() -> tuple[Any, Any]:
    with tf.Graph().as_default() as graph:
        v1.add_to_collection("result", hvd.allreduce(v1.placeholder(tf.float32, [], name="x"), op=hvd.Sum))
        return graph, v1.train.export_meta_graph()


def test_a_graph_that_is_imported(rank: int, size: int) -> None:
    graph, saved = saved_graph()
    name = graph.get_collection("result")[0].name
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(saved)
        assert session.run(v1.get_collection("result")[0], {"x:0": 2.0}) == 2 * size
    with tf.Graph().as_default(), v1.Session() as session:
        tf.import_graph_def(saved.graph_def, name="copy")
        assert session.run(f"copy/{name}", {"copy/x:0": 3.0}) == 3 * size
        reference = weakref.ref(graph)
        del graph
        gc.collect()
        assert reference() is None
        assert session.run(f"copy/{name}", {"copy/x:0": 4.0}) == 4 * size


def test_a_copy_of_a_graph_that_is_gone_says_so() -> None:
    saved = saved_graph()[1]
    gc.collect()
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.import_meta_graph(saved)
        with pytest.raises(tf.errors.OpError, match="was deleted, or was created by another process"):
            session.run(v1.get_collection("result")[0], {"x:0": 2.0})


def test_a_graph_that_has_trained_is_freed(rank: int, size: int) -> None:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        train, feed = regression(0)
        initialized(session)
        for step in range(5):
            session.run(train, feed(step))
    reference = weakref.ref(graph)
    del graph, session, train, feed
    gc.collect()
    assert reference() is None


# -- training ---------------------------------------------------------------------------------------------------------


def regression(rank: int, kind: Any = None, rows: int = 16, **arguments: Any) -> tuple[Any, Callable[[int], dict]]:
    """(train operation, what to feed in a step) of a linear model with some weights of each kind."""
    x, y = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.float32, [None, 1])
    w = v1.get_variable("w", [3, 1], initializer=v1.random_normal_initializer(seed=rank))
    table = v1.get_variable("table", [4, 1], initializer=v1.zeros_initializer())
    unused = v1.get_variable("unused", [2], initializer=v1.zeros_initializer())
    ids = tf.cast(tf.abs(x[:, 0]) * 10.0, tf.int32) % 4
    loss = tf.reduce_mean((tf.matmul(x, w) + tf.gather(table, ids) - y) ** 2)
    optimizer = hvd.DistributedOptimizer((kind or v1.train.AdamOptimizer)(0.05), **arguments)
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(loss, global_step=step, var_list=[w, table, unused])
    rng = np.random.default_rng(rank)

    def feed(_: int) -> dict:
        given = rng.normal(size=(rows, 3))
        return {x: given, y: given @ [[1.0], [2.0], [3.0]]}

    return train, feed


def weights_of(session: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in session.run(v1.trainable_variables())]


@pytest.mark.horovod("session-optimizer")
@sample("arguments", [
    {}, {"kind": v1.train.GradientDescentOptimizer}, {"kind": lambda rate: v1.train.MomentumOptimizer(rate, 0.9)},
    {"kind": v1.train.RMSPropOptimizer}, {"kind": v1.train.AdagradOptimizer}, {"kind": v1.train.FtrlOptimizer},
    {"sparse_as_dense": True, "groups": 2}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum},
    {"gradient_predivide_factor": 2.0}, {"op": hvd.Adasum, "sparse_as_dense": True},
    {"backward_passes_per_step": 3, "sparse_as_dense": True, "average_aggregated_gradients": True}],
    ids=lambda arguments: getattr(arguments.get("kind"), "__name__", "-".join(arguments) or "adam"))
def test_every_optimizer_trains_the_same_weights(arguments: dict, session: Any, rank: int, size: int) -> None:
    if arguments.get("op") is hvd.Adasum and size & (size - 1):
        pytest.skip("Adasum is for powers of two")
    train, feed = regression(rank, **arguments)
    everything = hvd.broadcast_global_variables(0)
    initialized(session)
    before = weights_of(session)
    session.run(everything)
    start = weights_of(session)
    for step in range(9):
        session.run(train, feed(step))
    end = weights_of(session)
    assert_equal_on_all_ranks([*start, *end])
    if rank == 0:
        np.testing.assert_array_equal(before[0], start[0])
    assert not np.array_equal(start[0], end[0]) and not np.array_equal(start[1], end[1])
    assert session.run(v1.train.get_global_step()) == 9


@both_modes
def test_the_average_is_that_of_one_process(session: Any, rank: int, size: int) -> None:
    """Gradients of a model in a session are averaged as the union of the batches has them."""
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    x = v1.placeholder(tf.float32, [None, 2])
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    pairs = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).compute_gradients(loss)
    initialized(session)
    given = [np.random.default_rng(other).normal(size=(4, 2)).astype(np.float32) for other in range(size)]
    found, = session.run([gradient for gradient, _ in pairs], {x: given[rank]})
    expected, = session.run(tf.gradients(loss, [w]), {x: np.concatenate(given)})
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_repeated_rows_have_the_same_bits(session: Any, rank: int, size: int) -> None:
    table = v1.get_variable("table", [5, 16], initializer=v1.zeros_initializer())
    ids, weights = v1.placeholder(tf.int32, [None]), v1.placeholder(tf.float32, [None, 16])
    loss = tf.reduce_sum(tf.gather(table, ids) * weights)
    train = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(loss)
    initialized(session)
    rng = np.random.default_rng(rank)
    for _ in range(3):
        session.run(train, {ids: rng.integers(0, 5, 5000), weights: rng.normal(size=(5000, 16))})
    assert_equal_on_all_ranks([session.run(table)])


def test_a_step_is_every_third_pass(session: Any, rank: int, size: int) -> None:
    w = v1.get_variable("w", [], initializer=v1.zeros_initializer())
    x = v1.placeholder(tf.float32, [])
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=3)
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(w * x, global_step=step)
    initialized(session)
    seen = []
    for value in range(6):
        session.run(train, {x: value + rank})
        seen.append(float(session.run(w)))
    mean = (size - 1) / 2
    np.testing.assert_allclose(seen, [0, 0, -3 - 3 * mean, -3 - 3 * mean, -3 - 3 * mean, -15 - 6 * mean])
    assert session.run(step) == 6


def test_an_optimizer_of_the_users_own(session: Any, rank: int, size: int) -> None:
    class Own:
        def compute_gradients(self, loss: Any, var_list: Any = None) -> list:
            return [(tf.gradients(loss, [each])[0], each) for each in var_list]

        def apply_gradients(self, pairs: Any, global_step: Any = None, name: Any = None) -> Any:
            return tf.group(*[v1.assign_sub(variable, gradient) for gradient, variable in pairs])

    w = v1.get_variable("w", [], initializer=v1.zeros_initializer())
    optimizer = hvd.DistributedOptimizer(Own())
    train = optimizer.apply_gradients(optimizer.compute_gradients(w * (rank + 1.0), var_list=[w]))
    initialized(session).run(train)
    assert session.run(w) == -(size + 1) / 2


@pytest.mark.horovod("sessions")
def test_the_hook_of_a_monitored_session(rank: int, size: int) -> None:
    with tf.Graph().as_default():
        train, feed = regression(rank)
        hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=5)]
        with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            start, count = session.run(v1.trainable_variables()), 0
            while not session.should_stop():
                _, end = session.run([train, v1.trainable_variables()], feed(count))
                count += 1
    assert_equal_on_all_ranks([*start, *end])
    assert count == 5


@both_modes
def test_some_variables(session: Any, rank: int, size: int) -> None:
    a = v1.get_variable("a", [2], initializer=v1.constant_initializer(float(rank)))
    b = v1.get_variable("b", [2], initializer=v1.constant_initializer(float(rank)))
    one = hvd.broadcast_variables([a], size - 1)
    initialized(session).run(one)
    assert session.run(a).tolist() == [size - 1] * 2 and session.run(b).tolist() == [rank] * 2
    assert session.run(hvd.broadcast_([b], 0))[0].tolist() == [0, 0]
    assert session.run(b).tolist() == [0, 0]


def test_weights_that_differ_are_an_error_in_the_first_steps(session: Any, rank: int, size: int,
                                                             restart: Callable[[], None]) -> None:
    if size == 1:
        pytest.skip("one rank")
    train, feed = regression(rank)
    initialized(session)
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"ranks train different weights: the values of w:0"):
        for step in range(3):
            session.run(train, feed(step))
    restart()


# -- errors -----------------------------------------------------------------------------------------------------------


@both_modes
def test_a_run_that_fails_on_one_rank_reaches_the_others(session: Any, rank: int, size: int,
                                                         restart: Callable[[], None]) -> None:
    if size == 1:
        pytest.skip("one rank")
    x = v1.placeholder(tf.float32, [])
    total = hvd.allreduce(tf.debugging.check_numerics(x, "bad input"), op=hvd.Sum)
    is_last = rank == size - 1
    assert session.run(total, {x: 1.0}) == size
    if is_last:
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
            session.run(total, {x: np.nan})
    with pytest.raises(tf.errors.OpError, match=r"disagree on how many executions .* have ended in an error"):
        session.run(total, {x: 1.0})
    restart()


def test_an_error_of_all_ranks_in_the_same_run_is_none_later(session: Any, rank: int, size: int) -> None:
    x = v1.placeholder(tf.float32, [])
    total = hvd.allreduce(tf.debugging.check_numerics(x, "bad input"), op=hvd.Sum)
    for _ in range(3):
        with pytest.raises(tf.errors.InvalidArgumentError, match="bad input"):
            session.run(total, {x: np.nan})
        assert session.run(total, {x: 1.0}) == size


def test_graphs_that_differ(session: Any, rank: int, size: int, restart: Callable[[], None]) -> None:
    if size == 1:
        pytest.skip("one rank")
    total = hvd.allreduce(tf.ones([2 + (rank == 0)]), op=hvd.Sum)
    with pytest.raises(tf.errors.FailedPreconditionError,
                       match=r"session\(\)/allreduce of ones: the ranks disagree on shape"):
        session.run(total)
    restart()


@pytest.mark.horovod("optimizer-old")
def test_an_optimizer_averages_without_a_session_too(rank: int, size: int) -> None:
    variable = tf.Variable([2.0])
    sgd = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.5))
    mean = (size + 1) / 2
    sgd.minimize(lambda: variable * (rank + 1.0))
    assert variable.numpy() == pytest.approx([2.0 - 0.5 * mean])

    @tf.function(autograph=False)
    def step() -> None:
        sgd.minimize(lambda: variable * (rank + 1.0))

    for _ in range(2):
        step()
    assert variable.numpy() == pytest.approx([2.0 - 1.5 * mean])


def test_what_is_refused(session: Any, rank: int) -> None:
    compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True, autograph=False)
    with pytest.raises(ValueError, match="XLA cannot compile a collective in a graph of a session"):
        compiled(tf.constant(1.0))
    sgd = v1.train.GradientDescentOptimizer(1.0)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd))
    with pytest.raises(ValueError, match=r"takes an optimizer of tf\.compat\.v1\.train\. Received: 'sgd'"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(ValueError, match=r"at least 1\. Received: 0"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="does not support backward_passes_per_step"):
        hvd.DistributedOptimizer(sgd, op=hvd.Adasum, backward_passes_per_step=2)


def test_what_python_calls_in_between_works(rank: int, size: int) -> None:
    """Eager collectives and tf.functions beside a session."""
    with tf.Graph().as_default() as graph:
        total = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
    step = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum), autograph=False)
    session = v1.Session(graph=graph)
    for _ in range(3):
        assert session.run(total) == size
        assert step(tf.constant(2.0)) == 2 * size
        assert hvd.allreduce(tf.constant(3.0), op=hvd.Sum) == 3 * size
    session.close()
    assert everywhere(rank) == list(range(size))
