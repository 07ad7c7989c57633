"""Where tensors of a graph go: by way of the host, or not; decided while it is traced."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

import mpistrat

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import mpistrat.tensorflow as hvd  # noqa: E402
from mpistrat.tensorflow.async_op import call_site, kernel, streams  # noqa: E402
from mpistrat.tensorflow.bridge import gpu_device  # noqa: E402
from mpistrat.tensorflow.xla import context  # noqa: E402
from tests.support import tensorflow_stand_in  # noqa: E402
from tests.support.gpu_stand_in import Device  # noqa: E402


def found(monkeypatch: pytest.MonkeyPatch, has_stream: bool = True) -> None:
    """A GPU, cupy, and TensorFlow's stream are there; without `has_stream`, whatever finds it is used."""
    monkeypatch.setattr(gpu_device, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_device, "why_no_cupy", lambda: "")
    call_site._warn_once.cache_clear()
    for module in (gpu_device, call_site):
        monkeypatch.setattr(module, "device_at", lambda where: Device())
    if has_stream:
        monkeypatch.setattr(streams, "stream_for", lambda device, where, process_set: object())


@pytest.fixture
def device_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """The choice for tensors that a function makes in a graph, as if there were a GPU and cupy."""
    found(monkeypatch)

    def choose(make: Callable[[], list[Any]]) -> Any:
        with tf.Graph().as_default():
            return call_site.device_of(make())

    mpistrat.init()
    yield choose
    mpistrat.shutdown()


def placed(device: str, dtype: Any = None) -> Any:
    with tf.device(device):
        return tf.zeros([2], dtype or tf.float32)


@pytest.mark.parametrize("make, device", [
    (lambda: [tf.zeros([2]), tf.zeros([], tf.float16), tf.zeros([1], tf.bfloat16)], "/device:GPU:0"),
    (lambda: [placed("GPU:1"), placed("/job:localhost/replica:0/task:0/device:GPU:1")], "/device:GPU:1"),
    (lambda: [tf.zeros([2]), tf.zeros([2], tf.int32)], None), (lambda: [tf.zeros([2]), placed("CPU:0")], None),
    (lambda: [placed("GPU:0"), placed("GPU:1")], None)],
    ids=["gradients", "on a GPU that is named", "integers", "one on the CPU", "two GPUs"])
def test_what_is_not_all_on_one_gpu_goes_by_way_of_the_host(make: Callable, device: str | None,
                                                            device_of: Callable) -> None:
    assert device_of(make) == device


def test_where_all_go_by_the_host_they_do_from_a_gpu_too(device_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISTRAT_GPU_OPERATIONS", "host")
    mpistrat.shutdown()
    mpistrat.init()
    assert device_of(lambda: [placed("GPU:0")]) is None


def test_eager_tensors_are_asked_where_they_are_instead() -> None:
    assert call_site.device_of([tf.zeros([2])]) is None


@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="there is a GPU")
def test_without_a_gpu_the_graph_is_what_it_was() -> None:
    hvd.init()
    graph = tf.function(lambda: hvd.grouped_allreduce([tf.zeros([2]), tf.zeros([3])])).get_concrete_function().graph
    hvd.shutdown()
    assert "MpistratAsyncCollective" not in {operation.type for operation in graph.get_operations()}


@pytest.mark.parametrize("visible, parts, numbers", [
    ([0, 1, 2], {}, [0, 1, 2]), ([2], {}, [2]), ([2, 1], {}, [1, 2]), ([1, 2], {1: 2}, [1, 1, 2])],
    ids=["all", "a pinned rank", "in any order", "a divided one"])
def test_the_number_of_a_logical_gpu_is_that_of_its_physical_one(visible: list[int], parts: dict[int, int],
                                                                 numbers: list[int],
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(3)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [gpus[i] for i in visible])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration",
                        lambda gpu: [object()] * parts.get(gpus.index(gpu), 0) or None)
    assert [gpu_device.cuda_number.__wrapped__(f"/device:GPU:{i}") for i in range(len(numbers))] == numbers


@pytest.mark.parametrize("cupy, reason", [
    ("it is not installed", "cupy is missing: it is not installed"),
    ("", "cupy cannot use the GPU: RuntimeError: cudaErrorInsufficientDriver: CUDA driver version is insufficient for "
         "CUDA runtime version")], ids=["no cupy", "no driver"])
def test_without_cupy_eager_tensors_and_graphs_go_by_way_of_the_host_with_one_warning(
        cupy: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:

    class Eager:
        backing_device = "/job:localhost/replica:0/task:0/device:GPU:0"

    monkeypatch.setattr(gpu_device, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_device, "why_no_cupy", lambda: cupy)
    # As cupy for a newer CUDA than the driver's, which can be imported.
    monkeypatch.setattr(gpu_device, "device_at", Mock(side_effect=RuntimeError(
        "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version")))
    call_site._warn_once.cache_clear()
    mpistrat.init()
    assert not call_site.are_on_gpu([Eager()])
    with tf.Graph().as_default():
        assert call_site.device_of([tf.zeros([2])]) is None
    mpistrat.shutdown()
    assert [message for message in caplog.messages if "cupy" in message] == [
        f"rank 0: TensorFlow's GPU tensors are copied to the host and reduced there as CPU tensors: {reason}. If other "
        "ranks do not log this warning, set MPISTRAT_GPU_OPERATIONS=host on all ranks."]


def test_gpus_that_the_script_has_hidden_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    tf.zeros([1])  # Its devices are fixed.
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpus)
    for visible in ([], gpus):
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind=None, visible=visible: visible)
        gpu_device._has_gpu.cache_clear()
        assert (gpu_device.has_gpu(), context.device_of_compiled() == "GPU:0") == (bool(visible),) * 2
    gpu_device._has_gpu.cache_clear()


@pytest.mark.parametrize("lacking, reason", [
    ("api", f"TensorFlow {tf.__version__} lacks the C API for asynchronous operations"),
    ("old TensorFlow", f"TensorFlow {tf.__version__} does not tell mpistrat its CUDA stream (TensorFlow 2.21 does); "
                       "the driver has no such call"),
    ("stream", "XLA gives no stream; the driver has no such call")])
def test_what_is_lacking_on_the_way_to_the_stream_is_in_one_warning(
        lacking: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:

    no_call = Mock(side_effect=OSError("the driver has no such call"))
    found(monkeypatch, has_stream=False)
    if lacking == "api":
        monkeypatch.setattr(kernel, "api", lambda: None)
        monkeypatch.setattr(kernel, "why_not", kernel.why_not.__wrapped__)
    elif lacking == "old TensorFlow":
        monkeypatch.setattr(streams.ffi, "api", lambda: None)
        monkeypatch.setattr(streams, "ContextStream", no_call)
    else:
        monkeypatch.setattr(streams, "stream_of_handler", Mock(side_effect=OSError("XLA gives no stream")))
        monkeypatch.setattr(streams, "ContextStream", no_call)
    mpistrat.init()
    graph = tf.function(lambda tensor: hvd.allreduce(tensor)).get_concrete_function(tf.TensorSpec([4])).graph
    mpistrat.shutdown()
    assert "MpistratAsyncCollective" not in {operation.type for operation in graph.get_operations()}
    assert [message for message in caplog.messages if "GPU" in message] == [
        f"rank 0: TensorFlow's GPU tensors are copied to the host and reduced there as CPU tensors: {reason}. If other "
        "ranks do not log this warning, set MPISTRAT_GPU_OPERATIONS=host on all ranks."]


@pytest.mark.parametrize("on_gpu, node, buckets", [(True, "MpistratAsyncCollective", 2), (False, "PyFunc", 3)])
def test_buckets_on_a_gpu_are_twice_as_large(on_gpu: bool, node: str, buckets: int,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    mpistrat.init()
    if on_gpu:
        tensorflow_stand_in.install(0, monkeypatch.setattr)
    step = tf.function(lambda *tensors: hvd.grouped_allreduce(tensors))
    graph = step.get_concrete_function(*[tf.TensorSpec([12, 2**18])] * 3).graph
    mpistrat.shutdown()
    assert len([operation for operation in graph.get_operations() if operation.type == node]) == buckets


def test_what_goes_by_way_of_the_host_is_compressed_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    mpistrat.init()
    step = tf.function(lambda tensor: hvd.reducescatter(tensor, compression=hvd.Compression.fp16))
    graph = step.get_concrete_function(tf.TensorSpec([4])).graph
    mpistrat.shutdown()
    submit, = [operation for operation in graph.get_operations() if operation.type == "PyFunc"]
    assert [tensor.dtype for tensor in submit.inputs] == [tf.float16]
