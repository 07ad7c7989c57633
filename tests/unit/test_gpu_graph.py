"""Where tensors of a graph go: by way of the host, or not; decided while it is traced."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpistrat

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The choice for tensors that a function makes in a graph, as if there were a GPU and cupy."""
    from mpistrat.tensorflow.bridge import gpu_eager, gpu_graph
    monkeypatch.setattr(gpu_eager, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_eager, "has_cupy", lambda: True)

    def choose(make: Callable[[], list[Any]]) -> Any:
        with tf.Graph().as_default():
            return gpu_graph.device_of(make())

    mpistrat.init()
    yield choose
    mpistrat.shutdown()


def placed(device: str, dtype: Any = None) -> Any:
    """A tensor of a graph that is said to be on a device."""
    with tf.device(device):
        return tf.zeros([2], dtype or tf.float32)


def test_gradients_stay_on_the_gpu(device_of: Callable) -> None:
    assert device_of(lambda: [tf.zeros([2]), tf.zeros([], tf.float16), tf.zeros([1], tf.bfloat16)]) == "/device:GPU:0"


def test_they_stay_on_the_gpu_that_is_named(device_of: Callable) -> None:
    assert device_of(lambda: [placed("GPU:1"), placed("/job:localhost/replica:0/task:0/device:GPU:1")]) == \
        "/device:GPU:1"


@pytest.mark.parametrize("make", [
    lambda: [tf.zeros([2]), tf.zeros([2], tf.int32)], lambda: [tf.zeros([2]), placed("CPU:0")],
    lambda: [placed("GPU:0"), placed("GPU:1")]], ids=["integers", "one on the CPU", "two GPUs"])
def test_what_is_not_all_on_one_gpu_goes_by_way_of_the_host(make: Callable, device_of: Callable) -> None:
    assert device_of(make) is None


def test_where_all_go_by_the_host_they_do_from_a_gpu_too(device_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRAT_GPU_OPERATIONS", "host")
    mpistrat.shutdown()
    mpistrat.init()
    assert device_of(lambda: [placed("GPU:0")]) is None


def test_eager_tensors_are_asked_where_they_are_instead() -> None:
    from mpistrat.tensorflow.bridge import gpu_graph
    assert gpu_graph.device_of([tf.zeros([2])]) is None


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_the_graph_is_what_it_was() -> None:
    import mpistrat.tensorflow as hvd
    hvd.init()
    graph = tf.function(lambda: hvd.grouped_allreduce([tf.zeros([2]), tf.zeros([3])])).get_concrete_function().graph
    hvd.shutdown()
    assert "EagerPyFunc" not in {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name, on_host", [("EagerPyFunc", set()), ("Reshape", {"shape"}), ("Shape", {"output"}),
                                           ("InplaceUpdate", set()), ("PartitionedCall", set()),
                                           ("ExpandDims", {"dim"}), ("Squeeze", set()), ("Bitcast", set())])
def test_tensorflow_has_what_a_graph_on_a_gpu_is_made_of(name: str, on_host: set[str], dtype: tf.DType) -> None:
    from tensorflow.python.framework import kernels
    found = [kernel for kernel in kernels.get_registered_kernels_for_op(name).kernel
             if kernel.device_type in ("GPU", "DEFAULT") and set(kernel.host_memory_arg) == on_host
             and all(not constraint.name.startswith("T") or constraint.name in ("Tshape", "Tdim")
                     or dtype.as_datatype_enum in constraint.allowed_values.list.type
                     for constraint in kernel.constraint if constraint.name not in ("out_type", "Tin", "Tout"))]
    assert found


def test_packs_and_fetches_are_not_in_program_order_but_submits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpistrat.tensorflow as hvd
    from tests.support import tensorflow_stand_in
    monkeypatch.setenv("MPISTRAT_ASYNC_OP", "0")
    mpistrat.init()
    tensorflow_stand_in.install(0, monkeypatch.setattr)

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        hvd.allreduce(tensor, name="a")
        return hvd.allreduce(tensor + 1, name="b")

    operations = step.get_concrete_function(tf.TensorSpec([3])).graph.get_operations()
    assert step(tf.zeros([3])).numpy().tolist() == [1, 1, 1]
    mpistrat.shutdown()
    unordered = [operation for operation in operations if operation.type == "PartitionedCall"]
    submits = [operation for operation in operations if operation.type == "PyFunc"]
    assert len(unordered) == 2 * len(submits) == 4
    assert not any(operation.control_inputs for operation in unordered)
    assert submits[0] in submits[1].control_inputs


def test_results_that_are_about_to_be_fetched_are_not_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpistrat.tensorflow as hvd
    from mpistrat.tensorflow.bridge.completion import COMPLETIONS
    from mpistrat.tensorflow.bridge.gpu_graph import _GpuCallSite
    from tests.support import tensorflow_stand_in
    monkeypatch.setenv("MPISTRAT_ASYNC_OP", "0")
    mpistrat.init()
    tensorflow_stand_in.install(0, monkeypatch.setattr)
    fetch = _GpuCallSite.fetch

    def reclaim_and_fetch(*arguments: Any) -> list[tf.Tensor]:
        while not all(slot.wait.is_woken for slot in COMPLETIONS._taken.values()):
            time.sleep(0.001)
        for _ in range(1000):  # TensorFlow gives the memory of arrays back when so many have gathered.
            tf.numpy_function(lambda: np.zeros(1), [], [tf.float64])
        with COMPLETIONS._lock:
            COMPLETIONS._reclaim(len(COMPLETIONS._taken))
        return fetch(*arguments)

    monkeypatch.setattr(_GpuCallSite, "fetch", reclaim_and_fetch)
    step = tf.function(lambda tensor: hvd.allreduce(tensor, name="a"))
    assert step(tf.ones([3])).numpy().tolist() == [1, 1, 1]
    mpistrat.shutdown()


@pytest.mark.parametrize("visible, parts, numbers", [
    ([0, 1, 2], {}, [0, 1, 2]), ([2], {}, [2]), ([2, 1], {}, [1, 2]), ([1, 2], {1: 2}, [1, 1, 2])],
    ids=["all", "a pinned rank", "in any order", "a divided one"])
def test_the_number_of_a_logical_gpu_is_that_of_its_physical_one(visible: list[int], parts: dict[int, int],
                                                                 numbers: list[int],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.tensorflow.bridge import gpu_eager
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(3)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpus[i] for i in visible])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration",
                        lambda gpu: [object()] * parts.get(gpus.index(gpu), 0) or None)
    assert [gpu_eager.cuda_number(i) for i in range(len(numbers))] == numbers


def test_a_cast_to_int32_is_in_the_memory_of_the_gpu() -> None:
    # As the index that InplaceUpdate takes there: copied from the host it would wait for the GPU.
    from tensorflow.python.framework import kernels
    dtypes = {"SrcT": tf.float32.as_datatype_enum, "DstT": tf.int32.as_datatype_enum}
    found = [kernel for kernel in kernels.get_registered_kernels_for_op("Cast").kernel if kernel.device_type == "GPU"
             and all(dtypes[rule.name] in rule.allowed_values.list.type for rule in kernel.constraint)]
    assert found and not any(kernel.host_memory_arg for kernel in found)


def test_without_cupy_eager_tensors_and_graphs_go_by_way_of_the_host_with_one_warning(
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from mpistrat.tensorflow.bridge import gpu_eager, gpu_graph

    class Eager:
        backing_device = "/job:localhost/replica:0/task:0/device:GPU:0"

    monkeypatch.setattr(gpu_eager, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_eager, "why_no_cupy", lambda: "it is not installed")
    gpu_eager.has_cupy.cache_clear()
    mpistrat.init()
    assert not gpu_eager.are_on_gpu([Eager()])
    with tf.Graph().as_default():
        assert gpu_graph.device_of([tf.zeros([2])]) is None
    mpistrat.shutdown()
    gpu_eager.has_cupy.cache_clear()
    assert [message for message in caplog.messages if "cupy" in message] == [
        "rank 0: TensorFlow's tensors on a GPU are copied to the host, since cupy is missing: it is not installed"]


@pytest.mark.parametrize("on_gpu, asynchronous, node, buckets", [
    (True, "0", "PyFunc", 2), (True, "1", "MpistratAsyncCollective", 2), (False, "1", "PyFunc", 3)])
def test_buckets_on_a_gpu_are_twice_as_large(on_gpu: bool, asynchronous: str, node: str, buckets: int,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    import mpistrat.tensorflow as hvd
    from tests.support import tensorflow_stand_in
    monkeypatch.setenv("MPISTRAT_ASYNC_OP", asynchronous)
    mpistrat.init()
    if on_gpu:
        tensorflow_stand_in.install(0, monkeypatch.setattr)
    step = tf.function(lambda *tensors: hvd.grouped_allreduce(tensors))
    graph = step.get_concrete_function(*[tf.TensorSpec([12, 2**18])] * 3).graph
    mpistrat.shutdown()
    assert len([operation for operation in graph.get_operations() if operation.type == node]) == buckets


def test_what_goes_by_way_of_the_host_is_compressed_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    import mpistrat.tensorflow as hvd
    from mpistrat.tensorflow.bridge import gpu_eager
    monkeypatch.setattr(gpu_eager, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_eager, "has_cupy", lambda: True)
    mpistrat.init()
    step = tf.function(lambda tensor: hvd.reducescatter(tensor, compression=hvd.Compression.fp16))
    graph = step.get_concrete_function(tf.TensorSpec([4])).graph
    mpistrat.shutdown()
    submit, = [operation for operation in graph.get_operations() if operation.type == "PyFunc"]
    assert [tensor.dtype for tensor in submit.inputs] == [tf.float16]


def test_a_bucket_is_copied_by_one_eager_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.tensorflow.bridge import gpu_graph
    from tests.support import tensorflow_stand_in
    calls = []
    mpistrat.init()
    tensorflow_stand_in.install(0, monkeypatch.setattr)
    site = gpu_graph._GpuCallSite("a", 0, lambda arrays: None, [tf.float32], gpu_graph.Execution(), None)
    row = tf.ones([1, 2, 3])
    site.pack(row)  # makes the mark and the index of the row
    executes = {name: getattr(tf, name) for name in ("reshape", "bitcast", "zeros", "cast", "expand_dims")}
    for name, execute in executes.items():
        monkeypatch.setattr(tf, name, lambda *of, name=name, execute=execute: calls.append(name) or execute(*of))
    site.pack(row)
    mpistrat.shutdown()
    assert calls == []
