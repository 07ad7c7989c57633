"""TensorFlow's tensors on the way for GPU tensors, eager and in tf.function: on a real GPU where there is one, and else
with its memory for that of a stand-in."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import mpistrat
from mpistrat.api import tensors as gpu_tensors
from mpistrat.core.errors import EngineError
from mpistrat.engine.engine import Engine
from mpistrat.gpu import backend
from mpistrat.gpu.arrays import GpuTensors
from mpistrat.tensorflow.async_op import call_site
from mpistrat.tensorflow.graph import buckets, xla_collective
from mpistrat.tensorflow.xla import context, ffi

from .helpers import assert_close, assert_equal_on_all_ranks
from .test_xla_collectives import COLLECTIVES, every_collective, numbers


def on_gpu(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.gpu, pytest.mark.skipif(
        not tf.config.list_physical_devices("GPU"), reason="TensorFlow sees no GPU")])


# With those named "host" the host waits for what the streams of the others wait for.
DEVICES = ["stand-in", "stand-in host", on_gpu("GPU"), on_gpu("GPU host")]


@pytest.fixture(scope="module", params=[DEVICES[0], pytest.param(DEVICES[1], marks=pytest.mark.nightly), *DEVICES[2:]])
def hvd(request: pytest.FixtureRequest) -> Iterator[Any]:
    """mpistrat.tensorflow, whose eager tensors go the way of GPU tensors. A test that ends the engine restarts it."""
    import mpistrat.tensorflow as hvd
    from tests.support import tensorflow_stand_in
    rank = mpistrat.rank()
    mpistrat.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPISTRAT_DISABLE", "stream_order" if request.param.endswith("host") else "none")
        mpistrat.init()
        if request.param.startswith("stand-in"):
            tensorflow_stand_in.install(rank, patch.setattr)
            yield hvd
        else:
            gpus = tf.config.list_logical_devices("GPU")
            with tf.device(gpus[rank % len(gpus)].name):
                yield hvd
        mpistrat.shutdown()
    mpistrat.init()


def test_a_sum_is_a_tensor_on_the_same_device(hvd: Any, rank: int, size: int) -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64", "int64"):
        tensor = tf.cast(tf.range(6.0) + float(rank), dtype)
        result = hvd.allreduce(tensor, op=hvd.Sum)
        assert (result.dtype, result.device) == (tensor.dtype, tensor.device)
        np.testing.assert_array_equal(result.numpy(), np.arange(6) * size + size * (size - 1) // 2)


def test_an_eager_result_may_be_changed_and_kept(hvd: Any, rank: int, size: int) -> None:
    kept = []
    for step in range(20):
        result = hvd.allreduce(tf.fill([1000], float(rank + step)), op=hvd.Max)
        kept.append(result[:500])
        variable = tf.Variable(result)
        variable.assign_add(tf.ones([1000]))
        np.testing.assert_array_equal(variable.numpy(), np.full(1000, size + step))
    for step, half in enumerate(kept):
        np.testing.assert_array_equal(half.numpy(), np.full(500, size - 1 + step))


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression_rounds_what_is_wider_without_a_cast_in_the_graph(name: str, in_graph: bool, hvd: Any, rank: int,
                                                                      size: int) -> None:
    compression = getattr(hvd.Compression, name)

    def step(wide: tf.Tensor, half: tf.Tensor) -> list[tf.Tensor]:
        return hvd.grouped_allreduce([wide, half], op=hvd.Max, compression=compression, name="compressed")

    function = tf.function(step) if in_graph else step
    tensors = [tf.fill([3], 1 / 3), tf.fill([2], tf.constant(float(rank), tf.float16))]
    wide, half = function(*tensors)
    assert (wide.dtype, half.dtype) == (tf.float32, tf.float16)
    np.testing.assert_array_equal(wide.numpy(), tf.cast(tf.cast(tensors[0], compression.dtype), tf.float32).numpy())
    np.testing.assert_array_equal(half.numpy(), [size - 1] * 2)
    if in_graph:
        operations = function.get_concrete_function(*tensors).graph.get_operations()
        assert "Cast" not in {operation.type for operation in operations}


def test_ranks_of_one_host_send_no_8_bit_numbers(hvd: Any, rank: int) -> None:
    tensor = tf.cast(tf.linspace(-1.0, 1.0, 10_000), tf.float32) * (rank + 1)
    result = hvd.allreduce(tensor, op=hvd.Sum, compression=hvd.Compression.int8)
    assert result.device == tensor.device
    np.testing.assert_array_equal(result, hvd.allreduce(tensor, op=hvd.Sum))


# -- in tf.function ---------------------------------------------------------------------------------------------------


def test_a_sum_in_a_graph_is_read_when_it_is_there_and_not_before(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return 2 * hvd.allreduce(tensor + 1, op=hvd.Sum, name="sum")

    for number in range(5):
        for dtype in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128"):
            tensor = tf.cast(tf.range(6.0) + float(rank + number), dtype)
            expected = 2 * (np.arange(6) + 1 + number) * size + size * (size - 1)
            np.testing.assert_array_equal(step(tensor).numpy(), expected, err_msg=dtype)


def _flattened(result: Any) -> Any:
    return tf.concat([tf.reshape(result, [-1]), tf.reshape(result + 0, [-1])], axis=0)


def _cast(result: Any) -> Any:
    with tf.device(result.device):
        return tf.cast(result, tf.float16)


# TensorFlow's optimizer moves these before a reshape.
_READERS = {"reshape": lambda result: tf.reshape(result, [-1]), "reshape of a negation":
            lambda result: tf.reshape(-result, [-1]), "flattened": _flattened, "cast": _cast}


@pytest.mark.parametrize("hvd", DEVICES, indirect=True)
@pytest.mark.parametrize("operation", ["allreduce", "grouped_allreduce", "allgather", "broadcast", "reducescatter",
                                       "alltoall"])
def test_no_node_reads_a_result_before_it_is_there(operation: str, hvd: Any, rank: int, size: int) -> None:
    def result_of(tensor: tf.Tensor, name: str) -> tf.Tensor:
        if operation in ("allreduce", "reducescatter"):
            return getattr(hvd, operation)(tensor, op=hvd.Sum, name=name, prescale_factor=3.0)
        if operation == "grouped_allreduce":
            return hvd.grouped_allreduce([tensor, tf.ones([70_000])], op=hvd.Sum, name=name, prescale_factor=3.0)[0]
        return hvd.broadcast(tensor, size - 1, name) if operation == "broadcast" else getattr(hvd, operation)(
            tensor, name=name)

    @tf.function
    def step(tensor: tf.Tensor) -> list[tf.Tensor]:
        return [read(result_of(tensor + 1, f"read {i}")) for i, read in enumerate(_READERS.values())]

    def expected(values: list[np.ndarray]) -> np.ndarray:
        if operation == "allgather":
            return np.concatenate(values)
        if operation == "alltoall":
            return np.concatenate([value[rank:rank + 1] for value in values])
        if operation == "reducescatter":
            return 3 * sum(values)[rank:rank + 1]
        return values[-1] if operation == "broadcast" else 3 * sum(values)

    own = np.arange(2.0 * size).reshape(size, 2)
    for number in range(5):
        right = tf.constant(expected([own + r + number + 1 for r in range(size)]), tf.float32)
        results = step(tf.constant(own + rank + number, tf.float32))
        for (name, read), result in zip(_READERS.items(), results, strict=True):
            np.testing.assert_array_equal(result.numpy(), read(right).numpy(), name)


def test_a_gradient_that_begins_with_a_reshape_reads_what_is_reduced(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def gradient(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            total = hvd.allreduce(tf.reduce_sum(values * values, axis=0), op=hvd.Sum, name="of squares")
            result = tf.reduce_sum(total * (rank + 1.0))
        return tape.gradient(result, values)

    values = np.arange(6.0).reshape(2, 3)
    for _ in range(5):
        np.testing.assert_array_equal(gradient(tf.constant(values, tf.float32)).numpy(), values * size * (size + 1))


def test_the_gradient_of_sync_batch_normalization_is_that_on_the_host(hvd: Any, rank: int, size: int,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    layer = pytest.importorskip("mpistrat.keras").SyncBatchNormalization()
    layer.build([None, 5])
    values = tf.constant(np.random.RandomState(rank).randn(8, 5), tf.float32)
    weights = tf.constant(np.random.RandomState(9).randn(8, 5), tf.float32)

    def gradient(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = tf.reduce_sum(weights * tf.square(layer(values, training=True)))
        return tape.gradient(result, values)

    with monkeypatch.context() as on_host:
        on_host.setattr(call_site, "device_of", lambda tensors, process_set=0: None)
        expected = tf.function(gradient)(values).numpy()
    step = tf.function(gradient)
    for _ in range(5):
        np.testing.assert_allclose(step(values).numpy(), expected, atol=1e-5)


def test_results_that_are_kept_are_not_written_again(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(tensor, op=hvd.Sum, name="kept")

    variable = tf.Variable(tf.zeros([1000]))
    variable.assign(step(tf.fill([1000], 7.0)))
    kept = [step(tf.fill([1000], float(i))) for i in range(10)]
    for i, result in enumerate(kept):
        np.testing.assert_array_equal(result.numpy(), np.full(1000, i * size))
    np.testing.assert_array_equal(variable.numpy(), np.full(1000, 7 * size))


def test_the_inputs_of_a_graph_are_not_written(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def step(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        doubled = 2 * tensor
        return hvd.allreduce(doubled, op=hvd.Sum, name="a"), hvd.allreduce(doubled, op=hvd.Max, name="b"), doubled

    tensor = tf.fill([3], float(rank))
    total, largest, doubled = step(tensor)
    assert total.numpy().tolist() == [size * (size - 1)] * 3 and largest.numpy().tolist() == [2 * (size - 1)] * 3
    assert doubled.numpy().tolist() == [2 * rank] * 3 and tensor.numpy().tolist() == [rank] * 3


def test_a_collective_that_a_rank_never_comes_to_fails_when_that_rank_leaves(
        hvd: Any, rank: int, size: int, restart: Callable[[], None]) -> None:
    def fail() -> None:
        raise ValueError("elsewhere")

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        if rank == size - 1:  # This rank never comes to the collective.
            with tf.control_dependencies([tf.numpy_function(fail, [], [])]):
                tensor = tensor + 0
        return hvd.allreduce(tensor, op=hvd.Sum, name="left_out")

    with pytest.raises(tf.errors.OpError, match=r"elsewhere" if rank == size - 1 else r"left_out"):
        step(tf.ones([3]))
    restart()
    assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [size] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_gathered_in_a_graph(dtype: str, hvd: Any, rank: int, size: int) -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 2], dtype)])
    def step(tensor: tf.Tensor) -> tf.Tensor:
        return 2 * hvd.allgather(tensor, name="rows")

    for number in range(3):
        result = step(tf.cast(tf.fill([rank + number, 2], rank), dtype))
        assert tf.cast(result, tf.float32).numpy().tolist() == [[2 * r, 2 * r] for r in range(size)
                                                                for _ in range(r + number)]


def test_slices_of_a_variable_are_gathered_in_a_graph(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def step(values: tf.Tensor) -> tf.IndexedSlices:
        slices = tf.IndexedSlices(values, tf.range(tf.shape(values, tf.int64)[0]), tf.constant([9, 3], tf.int64))
        return hvd.allreduce(slices, name="slices")

    result = step(tf.fill([rank + 1, 3], float(rank)))
    assert result.indices.numpy().tolist() == [i for r in range(size) for i in range(r + 1)]
    np.testing.assert_allclose(result.values.numpy(), [[r / size] * 3 for r in range(size) for _ in range(r + 1)])


def test_the_gradient_of_gathered_rows_is_this_ranks_part(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def gradient(values: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(values)
            result = tf.reduce_sum(hvd.allgather(values, name="differentiated rows") * (rank + 1.0))
        return tape.gradient(result, values)

    np.testing.assert_array_equal(gradient(tf.ones([rank + 1, 2])).numpy(), np.full((rank + 1, 2), (size + 1) / 2))


def test_empty_tensors_and_scalars_in_a_graph(hvd: Any, rank: int, size: int) -> None:
    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        return (hvd.allreduce(tf.zeros([0, 3]), name="empty"),
                hvd.allreduce(tf.constant(float(rank)), op=hvd.Sum, name="scalar"))

    empty, scalar = step()
    assert empty.shape == (0, 3) and scalar.numpy() == size * (size - 1) / 2


def test_a_disagreement_in_a_graph_is_an_error_on_every_rank(hvd: Any, rank: int, size: int,
                                                             restart: Callable[[], None]) -> None:
    @tf.function
    def step() -> tf.Tensor:
        return hvd.allreduce(tf.zeros([2 + (rank == size - 1)]), name="odd")

    with pytest.raises(tf.errors.OpError, match=r"odd: the ranks disagree on shape"):
        step()
    restart()


@pytest.mark.parametrize("operation", ["allreduce", "allgather"])
def test_ranks_whose_tensors_are_on_the_host_are_told_by_all(operation: str, hvd: Any, rank: int, size: int,
                                                            monkeypatch: pytest.MonkeyPatch,
                                                            restart: Callable[[], None]) -> None:
    if rank == size - 1:
        monkeypatch.setattr(call_site, "device_of", lambda tensors, process_set=0: None)

    @tf.function
    def step() -> tf.Tensor:
        return getattr(hvd, operation)(tf.zeros([2]), name="odd")

    with pytest.raises(tf.errors.OpError, match=r"odd: the ranks disagree on"):
        step()
    restart()


@pytest.mark.parametrize("way", ["eager", "graph", "compiled"])
def test_adasum_is_refused(way: str, hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "compiled" and ffi.api() is None:
        pytest.skip("this TensorFlow does not export XLA's FFI")
    monkeypatch.setattr(context, "why_not", lambda: "")

    def adasum(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Adasum)

    function = adasum if way == "eager" else tf.function(adasum, jit_compile=way == "compiled", autograph=False)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="Adasum is computed on the CPU"):
        function(tf.ones([3]))
    assert float(hvd.allreduce(tf.ones([]))) == 1  # The engine goes on.


# -- in functions that XLA compiles -----------------------------------------------------------------------------------


@pytest.fixture
def xla(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles collectives, also on a GPU."""
    if ffi.api() is None:
        pytest.skip("this TensorFlow does not export XLA's FFI")
    monkeypatch.setattr(context, "why_not", lambda: "")


def test_collectives_that_xla_has_compiled(xla: None, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(COLLECTIVES, "adasum")
    compiled, plain = (tf.function(every_collective, jit_compile=by_xla, autograph=False) for by_xla in (True, False))
    for number in range(2):
        x = numbers([4, 3], rank, number)
        expected = plain(x)
        for name, results in compiled(x).items():
            for mine, other in zip(results, expected[name], strict=True):
                assert (mine.dtype, mine.shape) == (other.dtype, other.shape), name
                np.testing.assert_allclose(mine, other, rtol=1e-2 if "16" in name or name == "compressed" else 1e-5,
                                           err_msg=name)


def test_gradients_and_extents_that_are_known_late(xla: None, hvd: Any, rank: int, size: int) -> None:
    @tf.function(jit_compile=True, autograph=False, input_signature=[tf.TensorSpec([None, 2])])
    def total(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(hvd.allgather(x) ** 2) + tf.cast(hvd.size_op(), tf.float32)

    for rows in (3, 5):
        x = tf.fill([rows, 2], float(rank))
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = total(x) + total(2.0 * x)
        assert float(value) == 2 * size + 5 * 2 * rows * sum(r * r for r in range(size))
        np.testing.assert_allclose(tape.gradient(value, x), np.full((rows, 2), 10.0 * rank))


def test_rows_that_differ_are_an_error_of_a_compiled_gather(xla: None, hvd: Any, rank: int,
                                                            restart: Callable[[], None]) -> None:
    gather = tf.function(lambda x: hvd.allgather(x), jit_compile=True, autograph=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must pass the same number of rows to a collective"):
        gather(tf.ones([5 if rank else 3]))
    restart()


@pytest.mark.nightly
def test_fit_of_a_compiled_model(xla: None, hvd: Any, rank: int) -> None:
    keras = pytest.importorskip("keras")
    import mpistrat.keras as khvd
    weights = []
    for jit_compile in (False, True):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(8), khvd.SyncBatchNormalization(),
                                  keras.layers.Dense(1)])
        model.compile(khvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse",
                      jit_compile=jit_compile)
        x = numbers([24, 6], rank).numpy()
        model.fit(x, x.sum(1), batch_size=8, verbose=0)
        assert_equal_on_all_ranks(model.get_weights())
        weights.append(model.get_weights())
    assert_close(*weights, rtol=1e-4)


def test_buckets_of_a_compiled_list_are_all_started_before_one_is_awaited(xla: None, hvd: Any, rank: int,
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    calls, submit, await_all = [], Engine.submit, xla_collective._Awaiting.execute
    monkeypatch.setattr(buckets, "GPU_BUCKET_BYTES", 64)
    monkeypatch.setattr(Engine, "submit", lambda *of: (calls.append("start"), submit(*of))[1])
    monkeypatch.setattr(xla_collective._Awaiting, "execute", lambda *of: (calls.append("await"), await_all(*of))[1])

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        def body(i: tf.Tensor, y: tf.Tensor) -> tuple:
            return i + 1, sum(hvd.grouped_allreduce([tf.sin(y + k) for k in range(3)], name="loop"))

        return [*hvd.grouped_allreduce([tf.sin(x + i) for i in range(5)], op=hvd.Sum, name="list"),
                tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]]

    compiled, plain = tf.function(step, jit_compile=True, autograph=False), tf.function(step, autograph=False)
    for number in range(3):
        x = numbers([4, 4], rank, number)
        calls.clear()
        results = compiled(x)
        assert calls == [*["start"] * 5, "await", *[*["start"] * 3, "await"] * 2]
        assert_close(results, plain(x), 0.0, rtol=1e-5)
        assert_equal_on_all_ranks([result.numpy() for result in results])


def test_a_start_that_fails_waits_for_those_before_it(xla: None, hvd: Any, rank: int, restart: Callable[[], None],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA frees the memory of a failed step, also that of a bucket which was started and is not complete."""
    started, submit, followed, follow = [], Engine.submit, [], GpuTensors.follow

    def submit_one(*of: Any) -> Any:
        if started:
            raise EngineError("there is no second bucket")
        started.append(submit(*of))
        return started[0]

    monkeypatch.setattr(buckets, "GPU_BUCKET_BYTES", 64)
    monkeypatch.setattr(Engine, "submit", submit_one)
    monkeypatch.setattr(GpuTensors, "follow", lambda *of: (followed.append(started[0].is_done), follow(*of))[1])
    step = tf.function(lambda x: hvd.grouped_allreduce([tf.sin(x + i) for i in range(3)], name="list"),
                       jit_compile=True, autograph=False)
    with pytest.raises(Exception, match="there is no second bucket"):
        step(numbers([4, 4], rank))
    assert followed == [True]
    monkeypatch.undo()
    restart()


def test_a_compiled_step_with_a_tape_does_not_wait_on_the_host(xla: None, hvd: Any, rank: int,
                                                               monkeypatch: pytest.MonkeyPatch) -> None:
    @tf.function(jit_compile=True, autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, name="forward") ** 2)
        return hvd.allreduce(tape.gradient(loss, x), op=hvd.Sum, name="gradient")

    for _ in range(3):  # The first ones are compared with the CPU.
        expected = step(numbers([4, 3], rank)).numpy()
    waits: list[object] = []
    for module in (gpu_tensors, backend):
        monkeypatch.setattr(module, "await_on_host", lambda *of: waits.append(of))
    np.testing.assert_array_equal(step(numbers([4, 3], rank)), expected)
    assert not waits
