"""The asynchronous operation: its kernel, the hand-over of `done`, and collectives of one rank by it on a stand-in."""

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import mpistrat  # noqa: E402
import mpistrat.tensorflow as hvd  # noqa: E402
from mpistrat.api import runtime  # noqa: E402
from mpistrat.core.errors import EngineError, InvalidRequestError, MismatchError  # noqa: E402
from mpistrat.core.handle import Handle  # noqa: E402
from mpistrat.core.request import ScaledOp  # noqa: E402
from mpistrat.gpu import proof  # noqa: E402
from mpistrat.tensorflow.async_op import c_api, kernel, streams  # noqa: E402
from mpistrat.tensorflow.bridge import gpu_device  # noqa: E402
from mpistrat.tensorflow.bridge.program_order import resource_of_name  # noqa: E402
from mpistrat.tensorflow.graph import buckets  # noqa: E402
from mpistrat.tensorflow.graph.buckets import ReduceSpec  # noqa: E402
from tests.support import tensorflow_stand_in  # noqa: E402
from tests.support.gpu_stand_in import Device  # noqa: E402
from tests.support.jobs import wait_until  # noqa: E402


def memory(address: int, nbytes: int) -> np.ndarray:
    held: Any = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(held, np.uint8)


class Copy:
    """A target that returns its inputs, in another thread, when `go_on` is set.

    Attributes:
        calls: How many have begun.
        most: How many were under way at the same time.
        is_forwarded: Whether the latest output has the memory of its input.
    """

    def __init__(self, itemsize: int = 4, first: int = 1, delay_s: float = 0.0):
        self._itemsize, self._first, self._delay_s = itemsize, first, delay_s
        self._lock, self._running = threading.Lock(), 0
        self.calls = self.most = 0
        self.is_forwarded = False
        self.go_on = threading.Event()
        self.go_on.set()

    def compute(self, call: kernel.Call) -> None:
        with self._lock:
            self._running += 1
            self.calls, self.most = self.calls + 1, max(self.most, self._running)
        threading.Thread(target=self._finish, args=(call,)).start()

    def _finish(self, call: kernel.Call) -> None:
        assert self.go_on.wait(20)
        time.sleep(self._delay_s)
        (source,), (shape,), (target,) = call.exchange(self._first, [None], True)
        self.is_forwarded = source == target
        nbytes = int(np.prod(shape)) * self._itemsize
        if nbytes:
            memory(target, nbytes)[:] = memory(source, nbytes)
        with self._lock:
            self._running -= 1
        call.complete()


def test_it_can_be_used_here() -> None:
    assert kernel.why_not() == ""


# -- done -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Makes a function stand for TensorFlow's that runs `done`."""
    found = c_api.is_deleted_by_tensorflow

    class Api:
        is_of_libstdcpp = True

    def replace(run: Any) -> None:
        Api.TF_RunAsyncOpKernelDoneCallback = staticmethod(run)  # type: ignore[attr-defined]
        monkeypatch.setattr(c_api, "api", lambda: Api)
        monkeypatch.setattr(c_api, "require_api", lambda: Api)
        found.cache_clear()

    yield replace
    found.cache_clear()


def invoke(address: int) -> None:
    c_api._Invoker(c_api._Function.from_address(address).invoker)(address)


def test_a_function_that_tensorflow_deletes_is_left(library: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = (ctypes.c_void_p,)
    ran: list[int] = []

    def run_and_delete(address: int) -> None:
        ran.append(address)
        invoke(address)
        c_api._Manager(c_api._Function.from_address(address).manager)(address, address, c_api._DESTROY)
        free(address)

    library(run_and_delete)
    assert c_api.is_deleted_by_tensorflow() is True
    library(lambda address: ran.append(address))
    monkeypatch.setattr(c_api, "is_deleted_by_tensorflow", lambda: True)
    c_api.Done(4096).run()
    assert ran[-1] == 4096


@pytest.mark.parametrize("run", [lambda address: None, lambda address: [invoke(address), invoke(address)]],
                         ids=["calls nothing", "calls it twice"])
def test_a_function_of_another_kind_is_not_used(run: Any, library: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    library(run)
    assert c_api.is_deleted_by_tensorflow() is None
    monkeypatch.setattr(kernel, "is_deleted_by_tensorflow", c_api.is_deleted_by_tensorflow)
    assert "completion functions of a type that mpistrat does not know" in kernel.why_not.__wrapped__()


def test_nothing_is_tried_with_another_standard_library(monkeypatch: pytest.MonkeyPatch, library: Callable) -> None:
    library(lambda address: pytest.fail("called"))
    monkeypatch.setattr(c_api.api(), "is_of_libstdcpp", False)
    assert c_api.is_deleted_by_tensorflow() is None


def test_a_library_without_a_function_of_the_api_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(c_api._PROTOTYPES, "TF_NoSuchFunction", (None, ()))
    assert c_api.api.__wrapped__() is None


# -- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32",
                                   "float64", "complex64", "complex128"])
def test_every_dtype_in_a_graph_and_eager(dtype: str) -> None:
    values = tf.cast(tf.constant([[0, 1, 2], [3, 4, 5]]), dtype)
    target = Copy(values.dtype.size)
    eager, = kernel.execute(target, [values])
    traced = tf.function(lambda tensor: kernel.node(target, [tensor])[0])(values)
    for result in (eager, traced):
        assert result.dtype == values.dtype and result.shape == (2, 3)
        assert tf.reduce_all(result == values)


def test_many_are_under_way_and_none_blocks_a_thread() -> None:
    targets = [Copy(first=2) for _ in range(100)]  # More than TensorFlow has threads.
    for target in targets:
        target.go_on.clear()

    @tf.function(autograph=False)
    def step(tensor: tf.Tensor) -> tf.Tensor:
        outputs = [kernel.node(target, [tensor + i], order=resource_of_name("/device:CPU:0", f"many {i}"))[0]
                   for i, target in enumerate(targets)]
        return tf.stack([tf.ensure_shape(output, [2]) for output in outputs])

    results: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: results.append(step(tf.zeros([2])).numpy()), daemon=True)
    thread.start()
    wait_until(lambda: all(target.calls for target in targets), 20)
    for target in reversed(targets):
        target.go_on.set()
    thread.join(20)
    assert results[0][:, 1].tolist() == list(range(100))


def test_nodes_of_one_name_run_one_after_the_other_in_calls_and_loops() -> None:
    target = Copy(first=2, delay_s=0.01)

    def node(tensor: tf.Tensor) -> tf.Tensor:
        return kernel.node(target, [tensor], order=resource_of_name("/device:CPU:0", "one name"))[0]

    @tf.function
    def inner(tensor: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(node(tensor), [1])

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        own = node(tensor)
        total = inner(tensor) + inner(tensor + 1) + tf.ensure_shape(own, [1])
        for i in tf.range(4):
            total += inner(tensor + tf.cast(i, tf.float32))
        return total

    assert step(tf.zeros([1])).numpy().tolist() == [1 + 6]
    assert target.calls == 7 and target.most == 1


def test_a_result_has_the_memory_of_an_input_that_nothing_else_refers_to() -> None:
    target = Copy()
    tf.function(lambda tensor: kernel.node(target, [tensor + 1])[0])(tf.ones([1000]))
    assert target.is_forwarded
    tf.function(lambda tensor: kernel.node(target, [tensor])[0])(tf.ones([1000]))
    assert not target.is_forwarded

    @tf.function
    def shared(tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        changed = tensor + 1
        return kernel.node(target, [changed])[0], changed

    shared(tf.ones([1000]))
    assert not target.is_forwarded


@pytest.mark.parametrize("error, kind", [
    (MismatchError("a: the ranks disagree"), tf.errors.FailedPreconditionError),
    (ValueError("in Python"), tf.errors.UnknownError)], ids=["mismatch", "python"])
def test_an_error_of_the_kernel_is_that_of_the_call(error: Exception, kind: type[Exception]) -> None:
    class Raises:
        def compute(self, call: kernel.Call) -> None:
            raise error

    text = f"{type(error).__name__}: {error}"
    target = Raises()
    for call in (lambda tensor: kernel.execute(target, [tensor]),
                 tf.function(lambda tensor: kernel.node(target, [tensor]))):
        with pytest.raises(kind, match=text):
            call(tf.ones([1]))


def test_an_error_elsewhere_is_raised_when_the_call_is_complete() -> None:
    target = Copy(delay_s=0.05)

    def fail() -> None:
        raise ValueError("elsewhere")

    @tf.function
    def step(tensor: tf.Tensor) -> tf.Tensor:
        result, = kernel.node(target, [tensor])
        with tf.control_dependencies([tf.numpy_function(fail, [], [])]):
            return result + tensor

    with pytest.raises(tf.errors.OpError, match="elsewhere"):
        step(tf.ones([1]))
    assert target._running == 0


def test_a_call_that_nothing_refers_to_has_failed() -> None:
    class Forgets:
        def compute(self, call: kernel.Call) -> None:
            del call

    target = Forgets()
    with pytest.raises(tf.errors.CancelledError, match="interrupted"):
        kernel.execute(target, [tf.ones([1])])


def test_a_graph_whose_target_is_gone_says_so() -> None:
    target = Copy()
    step = tf.function(lambda tensor: kernel.node(target, [tensor])[0])
    step(tf.ones([1]))
    number, = [number for number, known in kernel._targets.items() if known is target]
    del kernel._targets[number]
    with pytest.raises(tf.errors.UnknownError, match="was deleted, or was created by another process"):
        step(tf.ones([1]))


def test_targets_end_with_their_graphs() -> None:
    def traced() -> Any:
        target = Copy()
        return tf.function(lambda tensor: kernel.node(target, [tensor])[0])

    step = traced()
    step(tf.ones([1]))
    before = len(kernel._targets)
    del step
    # The thread that completes the call may still refer to the target.
    wait_until(lambda: gc.collect() >= 0 and len(kernel._targets) < before, 20)


class _Heap(ctypes.Structure):
    """struct mallinfo2 of glibc; `uordblks` are the bytes in use."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"))


@pytest.mark.nightly
def test_ten_thousand_calls_leave_nothing() -> None:
    in_use = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if in_use is None:
        pytest.skip("glibc before 2.33")
    in_use.restype = _Heap

    class Now:
        def compute(self, call: kernel.Call) -> None:
            call.output(0, (4,))
            call.complete()

    target = Now()
    step = tf.function(lambda tensor: kernel.node(target, [tensor])[0])
    tensor = tf.ones([4])

    def run(count: int) -> int:
        for _ in range(count):
            step(tensor)
        gc.collect()
        return int(in_use().uordblks)

    run(2000)
    before = run(1000)
    assert run(10_000) - before < 10_000 * 8  # A pointer a call would be more.


# -- TensorFlow's stream ----------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A stand-in for a GPU, for which TensorFlow's tensors are taken."""
    mpistrat.init()
    tensorflow_stand_in.install(0, monkeypatch.setattr)
    yield gpu_device.device_at("/device:CPU:0")
    mpistrat.shutdown()


WHERE = "/device:CPU:0"
context_stream, check = streams.ContextStream, streams.check


def refuse(device: Any, where: str) -> Any:
    """A way that the driver does not accept."""
    raise OSError("no such function")


def test_the_stream_itself_waits_for_results(device: Any) -> None:
    own = device.current_stream()
    assert [streams.stream_for(device, WHERE, process_set) for process_set in (0, 1)] == [(own, own)] * 2


@pytest.mark.parametrize("why", ["setting", "check"])
def test_where_the_stream_does_not_wait_the_host_does(
        why: str, device: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    wait = type(device).wait
    if why == "setting":
        monkeypatch.setenv("MPISTRAT_DISABLE", "stream_order")
        mpistrat.shutdown()
        mpistrat.init()
        device = gpu_device.device_at(WHERE)
    else:
        monkeypatch.setattr(type(device), "wait", lambda self, stream, event: None)
    own = device.current_stream()
    found = [streams.stream_for(device, WHERE, process_set) for process_set in (0, 1)]
    assert found == [(own, None)] * 2
    monkeypatch.setattr(type(device), "wait", wait)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([] if why == "setting" else [
        "rank 0: this process waits for reductions on the GPU, because the check of TensorFlow's CUDA stream has not "
        "passed: a stream read memory before it was written: 0 instead of 1"])
    assert hvd.allreduce(tf.fill([3], 2.0), op=hvd.Sum).numpy().tolist() == [2, 2, 2]


@pytest.mark.parametrize("refused, served", [("ContextStream", [True, True]), ("stream_of_handler", [True, False])])
def test_a_way_that_the_driver_refuses_is_done_without(refused: str, served: list[bool], device: Any,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, refused, refuse)
    found = [streams.stream_for(device, WHERE, process_set) for process_set in (0, 1)]
    assert [stream is not None for stream in found] == served


def test_the_check_refuses_a_way_that_reads_too_early(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = np.zeros(2**10, np.float32)
    monkeypatch.setattr(kernel, "lent", lambda *_: kernel.Memory([zeros.ctypes.data], [], [], []))
    with pytest.raises(Exception, match="before it was written"):
        check(device.current_stream(), device, WHERE)


def test_the_check_of_work_that_is_over_proves_nothing(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_LONGEST_S", 0.0)
    for stream in (device.current_stream(), device.stream()):  # The second one has nothing to do with TensorFlow.
        with pytest.raises(proof.UnprovenError, match="the GPU finished 40 steps of work too early"):
            check(stream, device, WHERE)


def test_each_logical_gpu_has_a_stream_of_its_own(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(streams, "stream_of_handler", lambda device, where: made.append(where) or device.stream())
    monkeypatch.setattr(streams, "check_waiting", lambda *_: None)
    found = [streams.stream_for(device, where) for where in (
        "/device:GPU:0", "/device:GPU:1", "/job:localhost/replica:0/task:0/device:GPU:1", "/device:GPU:0")]
    assert made == ["/device:GPU:0", "/device:GPU:1"]
    assert found[0] == found[3] != found[1] == found[2]


def test_the_driver_is_asked_for_an_event_of_the_context(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(streams.driver, "context", lambda: 7)
    monkeypatch.setattr(streams.driver, "record_in_context", lambda *of: calls.append(of))

    class Event:
        ptr = 8

    monkeypatch.setattr(streams.ffi, "api", lambda: None)  # TensorFlow before 2.21 tells nothing else.
    stream = context_stream(device, WHERE)
    stream.record(Event())
    assert stream.ptr == 7 and calls == [(7, 8)]


def test_xla_tells_no_stream_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.tensorflow.xla import ffi
    if ffi.api() is None:
        with pytest.raises(EngineError, match="does not tell mpistrat its CUDA stream"):
            streams.stream_of_handler(Device(), WHERE)
        return
    with pytest.raises(tf.errors.OpError, match="stream"):
        streams.stream_of_handler(Device(), WHERE)


# -- collectives ------------------------------------------------------------------------------------------------------


def test_eager_and_graph_are_one_operation(device: Any) -> None:
    assert hvd.allreduce(tf.fill([3], 2.0), op=hvd.Sum).numpy().tolist() == [2, 2, 2]
    step = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="in a graph"))
    kinds = [operation.type for operation in step.get_concrete_function(tf.TensorSpec([3])).graph.get_operations()]
    assert step(tf.fill([3], 2.0)).numpy().tolist() == [2, 2, 2]
    assert kinds.count("MpistratAsyncCollective") == 1 and not {"PyFunc", "EagerPyFunc"} & set(kinds)


def test_the_buckets_of_a_list_are_waited_for_together(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "GPU_BUCKET_BYTES", 64)
    step = tf.function(lambda tensor: hvd.grouped_allreduce([tensor + i for i in range(5)], op=hvd.Sum, name="list"))
    step(tf.ones([16]))
    executor = runtime.group_of("", 0).engine.controller.executor.device
    waited, release = [], executor._await_in_streams
    monkeypatch.setattr(executor, "_await_in_streams", lambda device, batches: (
        waited.append(sum(len(batch.works) for batch in batches)), release(device, batches)))
    assert [result.numpy().tolist() for result in step(tf.ones([16]))] == [[1.0 + i] * 16 for i in range(5)]
    assert len([count for count in waited if count]) <= 1  # The others were over before.


def test_the_observer_of_the_first_steps_gets_copies_on_the_host(device: Any) -> None:
    seen: list[list[float]] = []

    def observe(arrays: Any, thread: str) -> bool:
        seen.append(arrays[0].tolist())
        return len(seen) < 2

    spec = ReduceSpec("observed", ScaledOp(hvd.Sum), observer=observe)
    step = tf.function(lambda tensor: buckets.reduce_list([tensor], spec), autograph=False)
    for i in range(4):
        step(tf.fill([2], float(i)))
    assert seen == [[0, 0], [1, 1]]


def test_an_eager_error_is_that_of_the_collective_and_later_calls_work(device: Any) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        hvd.allreduce(tf.cast(tf.ones([2]), tf.complex64), op=hvd.Max)
    assert isinstance(caught.value, InvalidRequestError)
    assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [1, 1]


def test_after_an_eager_call_that_ctrl_c_has_ended_others_work(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(handle: Handle, timeout_s: float | None = None) -> None:
        raise KeyboardInterrupt

    hvd.allreduce(tf.ones([2]), op=hvd.Sum)
    with monkeypatch.context() as patch:
        patch.setattr(Handle, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(tf.fill([3], 5.0), op=hvd.Sum)
    assert hvd.allreduce(tf.ones([2]), op=hvd.Sum).numpy().tolist() == [1, 1]


def test_a_runtime_that_has_ended_keeps_no_gpu(device: Any) -> None:
    def train() -> "weakref.ref[Any]":
        hvd.allreduce(tf.ones([2]))
        spec = ReduceSpec("a", ScaledOp(hvd.Sum), observer=lambda *of: True)
        step = tf.function(lambda tensor: buckets.reduce_list([tensor], spec), autograph=False)
        step(tf.ones([2]))
        return weakref.ref(gpu_device.device_at(WHERE))

    mpistrat.shutdown()
    mpistrat.init()
    its = train()
    mpistrat.shutdown()
    # The watchdog's thread refers to it until it ends.
    wait_until(lambda: gc.collect() >= 0 and its() is None, 20)
