"""Two ways to record a CUDA event after the work in TensorFlow's compute stream: in the stream, or in a substitute.

TensorFlow calls the kernel of an asynchronous operation when the work that computes its inputs is in TensorFlow's
stream. The engine's streams must wait for that work. But TensorFlow's C API does not give a GPU's stream to a kernel:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/c/kernels.cc#L358
From TensorFlow 2.21 on, XLA's C API gives the stream to the handler of a custom call. This stream can also wait for the
results. In earlier versions the substitute records an event of the whole CUDA context, and the host waits for results.
Each way is tested on the GPU before it is used. If neither works, tensors are copied to the host and reduced there.
"""

import itertools
import logging
import secrets
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

import tensorflow as tf

from ...api import runtime
from ...api.job import Job
from ...core.errors import EngineError
from ...gpu import driver
from ...gpu.arrays import CudaEvent, RecordedStream
from ...gpu.backend import await_on_host
from ...gpu.proof import LIMIT_S, Race, late_copy, one_line, prove
from ..bridge.private_names import SynchronousExecution
from ..xla import ffi
from ..xla.custom_call import custom_call
from . import kernel

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

logger = logging.getLogger(__name__)

BY_HOST = ("rank %d: TensorFlow's GPU tensors are copied to the host and reduced there as CPU tensors: %s. If other "
           "ranks do not log this warning, set MPISTRAT_GPU_OPERATIONS=host on all ranks.")
_CHECKED_ELEMENTS = 2**25  # A kernel takes 0.1 ms, by the bandwidth of an H100.


class ContextStream:
    """A substitute stream: records an event after all work of the CUDA context. Needs a driver of CUDA 12.5 or later.

    The event also waits for the engine's earlier collectives. If process sets overlap, ranks may enqueue collectives in
    different orders and would wait for each other. So the substitute serves only collectives of all ranks.
    """

    def __init__(self, device: "Device", where: str):
        del device, where  # The context is this thread's.
        self.ptr = driver.context()

    def record(self, event: CudaEvent) -> None:
        driver.record_in_context(self.ptr, event.ptr)


class _Handler:
    """The Python object that a custom call of XLA calls: its attribute `pointer` gets the address of XLA's stream."""

    pointer = 0

    def execute(self, call: ffi.Call) -> None:
        self.pointer = call.stream()


def stream_of_handler(device: "Device", where: str) -> RecordedStream:
    """Call a compiled function to find TensorFlow's CUDA stream. Raises EngineError before TensorFlow 2.21."""
    if ffi.api() is None:
        raise EngineError(f"TensorFlow {tf.__version__} does not tell mpistrat its CUDA stream (TensorFlow 2.21 does)")
    handler = _Handler()

    @tf.function(autograph=False, jit_compile=True)
    def ask(tensor: tf.Tensor) -> tf.Tensor:
        return custom_call(handler, [tensor], [tensor.dtype], [tensor.shape])[0]

    with SynchronousExecution(), tf.device(where):
        ask(tf.zeros([1]))
    return device.stream_at(handler.pointer)


class Found(NamedTuple):
    """TensorFlow's compute stream, or a ContextStream in its place."""

    stream: RecordedStream  # Records events.
    reader: RecordedStream | None  # The stream itself, which waits for results; None: the host waits.


# By runtime, which has one GPU, and by TensorFlow's name of the GPU, since each logical GPU has a separate stream. A
# pair: for collectives of all ranks, and for those of process sets. A stream may refer to its Device, which as a weak
# key would never be freed.
_found: "WeakKeyDictionary[Job, dict[str, tuple[Found | None, Found | None]]]" = WeakKeyDictionary()
_finding = threading.Lock()


def stream_for(device: "Device", where: str, process_set: int = 0) -> Found | None:
    """Return the compute stream of TensorFlow's GPU `where`, or a ContextStream in its place; None if neither works.

    The first call for a GPU tests the stream and, if that fails, the ContextStream. It may log a warning.
    """
    current = runtime.current()
    found = _found.get(current)
    if found is None or where not in found:
        with _finding, tf.init_scope():
            found = _found.setdefault(current, {})
            short = f"/device:{where.rpartition('/device:')[2]}"
            if short not in found:
                found[short] = _find(device, short)
            found[where] = found[short]
    return found[where][process_set != 0]


def _find(device: "Device", where: str) -> tuple[Found | None, Found | None]:
    rank, reasons = runtime.current().topology.rank, list[str]()
    own = _checked(stream_of_handler, device, where, reasons)
    if own is None:
        context = _checked(ContextStream, device, where, reasons)
        if context is None:
            logger.warning(BY_HOST, rank, "; ".join(dict.fromkeys(reasons)))
        return None if context is None else Found(context, None), None
    if not runtime.current().settings.uses("stream_order"):
        return (Found(own, None),) * 2
    try:
        with device.current():
            check_waiting(own, device, where)
        logger.info("rank %d: the check of TensorFlow's CUDA stream on %s has passed", rank, where)
        return (Found(own, own),) * 2
    except Exception as error:
        logger.warning("rank %d: this process waits for reductions on the GPU, because the check of TensorFlow's CUDA "
                       "stream has not passed: %s", rank, one_line(error))
        return (Found(own, None),) * 2


def _checked(way: Callable[["Device", str], RecordedStream], device: "Device", where: str,
             reasons: list[str]) -> RecordedStream | None:
    """Return the result of `way` if it passes `check`. If not, add the reason to `reasons` and return None."""
    try:
        with device.current():
            stream = way(device, where)
            check(stream, device, where)
    except Exception as error:
        reasons.append(one_line(error))
        return None
    return stream


def check_waiting(stream: RecordedStream, device: "Device", where: str) -> None:
    """Raise EngineError unless a test shows that TensorFlow's work waits for an event that `stream` waits for."""
    nbytes = device.checked_bytes
    scratch = device.scratch(nbytes)
    if scratch is None:
        raise EngineError(f"the check of CUDA streams needs {nbytes} bytes of GPU memory, and not enough is free")

    def race(work: int) -> Race:
        given, read = tf.ones([nbytes // 4]), tf.zeros([nbytes // 4])
        tf.reduce_min(read)  # TensorFlow takes a millisecond for the first one.
        source, target = kernel.lent([given, read], ()).sources
        end, early, early_end = late_copy(device, target, scratch.address, source, nbytes, device.record(stream), work)
        device.wait(stream, end)
        least = tf.reduce_min(read)
        runs = not end.done
        value = float(least)
        for event in (end, early_end):  # Until then the memory is in use.
            await_on_host(event, LIMIT_S)
        return Race(value, 1.0, runs, float(early.view("float32")[0]))

    with SynchronousExecution(), tf.device(where):
        prove(race)


def check(stream: RecordedStream, device: "Device", where: str) -> None:
    """Raise EngineError unless a test shows that an event in `stream` comes after TensorFlow's earlier work."""
    ordered, unordered, memory = device.stream(), device.stream(), device.pinned(8)
    started = itertools.count(secrets.randbits(16))

    def race(work: int) -> Race:
        first = float(next(started))  # Memory that is used again has other numbers.
        tensor = tf.fill([_CHECKED_ELEMENTS if ":GPU:" in where else 2**10], first)
        for _ in range(work):
            tensor = tensor + 1.0
        address, = kernel.lent([tensor], ()).sources
        ready = device.record(stream)
        runs = not ready.done
        device.wait(ordered, ready)
        for index, ours in enumerate((ordered, unordered)):
            device.copy(memory.ctypes.data + 4 * index, address + 4 * (int(tensor.shape[0]) - 1), 4, ours)
        for ours in (ordered, unordered):
            await_on_host(device.record(ours), LIMIT_S)
        read = memory.view("float32")
        return Race(float(read[0]), first + work, runs, float(read[1]))

    with SynchronousExecution(), tf.device(where):
        prove(race)
