"""TensorFlow's compute stream, as far as events need it: three ways to record an event after the work in it.

The kernel of an asynchronous operation runs when the work that computes its inputs is in TensorFlow's stream, and the
engine's streams must wait for that work. TensorFlow's C API gives no stream of a GPU to a kernel:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/c/kernels.cc#L358
So each way is a RecordedStream in place of that stream. None of them has been run on a GPU. The first that the driver
and a check accept is used; if there is none, tensors go the way of bridge.gpu_graph and bridge.gpu_eager.
"""

import itertools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...api import runtime
from ...core.errors import EngineError
from ...gpu import driver
from ...gpu.arrays import CudaEvent, RecordedStream
from ...gpu.backend import await_on_host
from ..bridge.sync_execution import SynchronousExecution
from ..xla import ffi
from ..xla.custom_call import custom_call
from . import kernel

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

logger = logging.getLogger(__name__)

_CELLS = 256
_ONE = 0x3F800000  # the bits of the float32 1.0
_LIMIT_S = 10.0  # for what a GPU does in milliseconds
_CHECKED_ELEMENTS, _CHECKED_STEPS = 2**25, 40  # 40 kernels of 0.1 ms, by the bandwidth of an H100


class ContextStream:
    """Way 1: an event after all work of the CUDA context, with cuCtxRecordEvent of drivers from 12.5 on.

    That is the work of all streams, also that of the engine. Ranks whose process sets overlap may enqueue it in
    different orders, and would wait for each other. So it serves only collectives of all ranks.
    """

    def __init__(self, device: "Device", where: str):
        del device, where  # The context is this thread's.
        self.ptr = self._context = driver.context()

    def record(self, event: CudaEvent) -> None:
        """See gpu.arrays.RecordedStream."""
        driver.record_in_context(self._context, event.ptr)


class UpdateStream:
    """Way 2: a stream of ours waits until an in-place update, in TensorFlow's stream, has written a number.

    The update is enqueued before the wait, so that a queue of the GPU which both share does not block.
    """

    def __init__(self, device: "Device", where: str):
        self._where, self._stream = where, device.stream()
        self.ptr = self._stream.ptr
        self._lock, self._turns = threading.Lock(), itertools.cycle(range(_CELLS))
        self._latest: dict[int, Any] = {}  # the event that is recorded last with each cell
        self._places: dict[int, tf.Tensor] = {}
        with SynchronousExecution(), tf.device(where):
            self._cells, self._one = tf.zeros([_CELLS]), tf.ones([1])
            self._cells.numpy()  # Waits for the zeros.
        self._address, = addresses([self._cells])

    def record(self, event: CudaEvent) -> None:
        """See gpu.arrays.RecordedStream."""
        with self._lock:
            cell = next(self._turns)
            if cell in self._latest:
                await_on_host(self._latest[cell], _LIMIT_S)
            with SynchronousExecution(), tf.device(self._where):
                tf.raw_ops.InplaceUpdate(x=self._cells, i=self._place(cell), v=self._one)
            address = self._address + 4 * cell
            driver.await_value(self._stream.ptr, address, _ONE)
            driver.write_value(self._stream.ptr, address, 0)
            self._stream.record(event)
            self._latest[cell] = event

    def _place(self, cell: int) -> tf.Tensor:
        """The number of a cell in the GPU's memory."""
        if cell not in self._places:
            # An int32 that is not computed on the GPU would be on the host.
            self._places[cell] = tf.cast(tf.fill([1], float(cell)), tf.int32)
        return self._places[cell]


class _Handler:
    """Asks XLA for the stream of the call."""

    pointer = 0

    def execute(self, call: ffi.Call) -> None:
        self.pointer = call.stream()


def stream_of_handler(device: "Device", where: str) -> RecordedStream:
    """Way 3: the stream itself, which XLA tells a handler that a small compiled function calls."""
    if ffi.api() is None:
        raise EngineError(f"TensorFlow {tf.__version__} has no interface for it; 2.21 has")
    handler = _Handler()

    @tf.function(autograph=False, jit_compile=True)
    def ask(tensor: tf.Tensor) -> tf.Tensor:
        return custom_call(handler, [tensor], [tensor.dtype], [tensor.shape])[0]

    with SynchronousExecution(), tf.device(where):
        ask(tf.zeros([1]))
    return device.stream_at(handler.pointer)


Way = Callable[["Device", str], RecordedStream]
WAYS: dict[str, Way] = {
    "events over the context (cuCtxRecordEvent)": ContextStream,
    "an in-place update and cuStreamWaitValue32": UpdateStream,
    "the stream of a handler of XLA's": stream_of_handler,
}

# By runtime, whose GPU is one. A stream may refer to its Device, which a weak key would then never be freed from.
_found: "WeakKeyDictionary[runtime.Runtime, RecordedStream | None]" = WeakKeyDictionary()
_finding = threading.Lock()


def stream_for(device: "Device", where: str) -> RecordedStream | None:
    """What stands for TensorFlow's compute stream; None if no way works. Rank 0 logs which one does.

    Args:
        device: This rank's GPU.
        where: TensorFlow's name of it.
    """
    current = runtime.current()
    with _finding:
        if current not in _found:
            with tf.init_scope():
                _found[current] = _first_that_works(device, where)
        return _found[current]


def _first_that_works(device: "Device", where: str) -> RecordedStream | None:
    reasons = []
    for name, way in WAYS.items():
        try:
            with device.current():
                stream = way(device, where)
                check(stream, device, where)
        except Exception as error:
            reasons.append(f"{name}: {' '.join(str(error).split())[:300]}")
            continue
        if runtime.current().topology.rank == 0:
            logger.info("rank 0: GPU tensors are handed over without a wait, by %s", name)
        return stream
    logger.warning("rank %d: GPU tensors are copied before they are reduced, since there is no way to wait for "
                   "TensorFlow's stream: %s", runtime.current().topology.rank, "; ".join(reasons))
    return None


def check(stream: RecordedStream, device: "Device", where: str) -> None:
    """Raise EngineError if a stream of ours reads a tensor too early after an event of `stream`."""
    elements = _CHECKED_ELEMENTS if ":GPU:" in where else 2**10
    with SynchronousExecution(), tf.device(where):
        tensor = tf.zeros([elements])
        for _ in range(_CHECKED_STEPS):
            tensor = tensor + 1.0
    address, = addresses([tensor])
    copies, memory = device.stream(), device.pinned(4)
    device.wait(copies, device.record(stream))
    device.copy(memory.ctypes.data, address + 4 * (elements - 1), 4, copies)
    await_on_host(device.record(copies), _LIMIT_S)
    value = float(memory.view("float32")[0])
    if value != _CHECKED_STEPS:
        raise EngineError(f"a tensor was read before it was complete: {value:g} instead of {_CHECKED_STEPS}")


def addresses(tensors: list[tf.Tensor]) -> list[int]:
    """The addresses of eager tensors of one device. Does not wait for their contents."""
    target = _Looking(len(tensors))
    kernel.execute(target, tensors)
    return target.found


class _Looking:
    """Reads the addresses of its inputs."""

    def __init__(self, count: int):
        self._count = count

    def compute(self, call: kernel.Call) -> None:
        self.found = [call.input(1 + i)[0] for i in range(self._count)]
        for i in range(self._count):
            call.output(i, (0,))
        call.complete()
