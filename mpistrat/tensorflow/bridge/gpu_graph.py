"""Collectives on tensors on a GPU inside a tf.function: the tensors stay on the GPU.

A collective consists of four nodes, which divide the work differently from the three in `cpu`:

1. *begin*, a callback on the host that returns a ticket. (The results of a node on the GPU are on the GPU, and can be
   read only when it has finished all earlier work.)
2. *submit*, a py_function on the GPU, which gets the tensors as eager tensors. It allocates the results and returns
   them before they are written. Another thread exports both by DLPack and submits them: an export waits until the GPU
   has computed the tensor, and TensorFlow may have no other thread.
3. *await*, as in `cpu`.
4. *fetch*, a callback on the host that raises, or returns the shapes of the results. A reshape of the results uses
   these shapes, so that no node reads the results earlier. It copies nothing. (A py_function would be stateful, so
   TensorFlow would order it before the next submit. TensorFlow's optimizer may remove an identity with a control
   dependency where a copy to another device follows, and the copy would then start too early.)

The submit gets the ticket, and the number of gathered rows, as first dimensions of tensors without elements, because
shapes are on the host.

TensorFlow's placer chooses the device of a tensor after the function has been traced, when the graph cannot change any
more. So `device_of` decides from what is known during tracing.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...api.interop import go_by_host, why_no_cupy
from ...core.handle import Handle, complete_all
from ...core.request import DEVICE_GPU, Request, allgather_request, specs_of
from ...gpu.arrays import GpuInput
from ..types import Arrays
from . import cpu, executions, gpu_eager
from .completion import COMPLETIONS, TICKET, awaited, execution_of, queue_of
from .cpu import MakeRequest
from .executions import Execution
from .observers import Observer
from .own_executor import at_once
from .program_order import calls_in_order
from .python_op import host_call, keep_thread_state, tensor_call

logger = logging.getLogger(__name__)


def device_of(tensors: Sequence[tf.Tensor]) -> str | None:
    """The GPU on which tensors of a graph are reduced; None: all of them go through the host.

    They stay on the GPU if there is one, none of them is placed on the CPU, and all have floating-point or complex
    dtypes, as gradients do: others TensorFlow has no GPU kernels for, or keeps on the host. A tensor that turns out to
    be on the host is copied.
    """
    if tf.executing_eagerly() or not gpu_eager.has_gpu() or not _has_cupy() or go_by_host():
        return None
    if not all(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        return None
    places = {tf.DeviceSpec.from_string(tensor.device) for tensor in tensors if tensor.device}
    if any(place.device_type not in (None, "GPU") for place in places):
        return None
    numbers = {place.device_index or 0 for place in places} or {0}
    return f"/device:GPU:{numbers.pop()}" if len(numbers) == 1 else None


@cache
def _has_cupy() -> bool:
    reason = why_no_cupy()
    if reason:
        logger.warning("GPU tensors of a tf.function are copied to the host, for they need cupy: %s", reason)
    return not reason


def run(device: str, name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape], rows: Sequence[tf.Tensor] = (), process_set: int = 0,
        observer: Observer | None = None) -> list[tf.Tensor]:
    """Run one collective in a graph, as `cpu.run`; the results are on the same device. Collective.

    Args:
        device: The result of `device_of`.
        name: Identifies the collective on all ranks.
        make_request: Called with the tensors as GpuInputs.
        tensors: At least one.
        shapes: The static shape of each result, as far as it is known.
        rows: The first dimension of each result, int64 on the host. The default is the shapes of the tensors.
        process_set: The id of the process set, which `make_request` sets too.
        observer: Called with copies on the host before the submit.
    """
    cpu.require_function()
    execution = executions.current() or Execution()
    site = _GpuCallSite(name, make_request, len(tensors), execution, process_set, observer)
    past = [execution.number] if execution.is_past else []
    calls_in_order()
    COMPLETIONS.prepare()
    with tf.device("CPU:0"):
        ticket = cpu.scalars(host_call(site.begin, past, TICKET, stateful=True))
        shapes_of_carriers = [tf.stack([size, 0]) for size in (ticket[0], *rows)]
    with tf.device(device):
        carriers = [tf.reshape(tf.zeros([0]), shape) for shape in shapes_of_carriers]
        made = tensor_call(site.submit, [*tensors, *carriers], [t.dtype for t in tensors])
    with tf.device("CPU:0"):
        known = host_call(site.fetch, [awaited(ticket, queue_of(ticket))], [tf.int64] * len(made), stateful=False)
    results = []
    with tf.device(device):
        for result, shape_of_result, shape in zip(made, known, shapes, strict=True):
            shape_of_result.set_shape([shape.rank])
            results.append(tf.reshape(result, shape_of_result))
            results[-1].set_shape(shape)
    if execution.number is None:
        with tf.device("CPU:0"):
            execution.number = execution_of(ticket)
    return results


def gather(device: str, name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
           shapes: Sequence[tf.TensorShape], process_set: int = 0, observer: Observer | None = None) -> list[tf.Tensor]:
    """As `run`, for an all-gather. The ranks first gather their numbers of rows, to allocate the results.

    Args:
        tensors: Of one dimension or more.
        observer: As in `run`.
    """
    def rows_of(arrays: Sequence[np.ndarray | GpuInput]) -> Request:
        # The same name as on ranks whose tensors are on the host, so that all ranks get the mismatch error.
        return allgather_request(name, specs_of(arrays), process_set=process_set)

    with tf.device("CPU:0"):
        own = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
        rows, = cpu.run(rows_of, [own[tf.newaxis]], [tf.TensorShape([None, len(tensors)])])
        totals = tf.unstack(tf.reduce_sum(rows, axis=0))
    another = f"{name}/on GPUs"
    return run(device, another, lambda arrays: dataclasses.replace(make_request(arrays), name=another), tensors,
               shapes, totals, process_set, observer)


class _GpuCallSite:
    """The callbacks of one collective on GPU tensors in a graph; see cpu._CpuCallSite."""

    def __init__(self, name: str, make_request: MakeRequest, tensors: int, execution: Execution,
                 process_set: int, observer: Observer | None):
        self._name, self._make_request, self._tensors, self._observer = name, make_request, tensors, observer
        self._process_set, self._counts = process_set, execution.number is None
        self._suffixes: dict[int, str] = {}  # by the number of the ticket

    def begin(self, *past: np.int64) -> Arrays:
        """Return a ticket for the result."""
        keep_thread_state()
        ticket = COMPLETIONS.open_ticket(executions.next_number(self._name, self._process_set) if self._counts
                                         else 0)
        self._suffixes[int(ticket[0])] = executions.suffix(int(past[0])) if past else ""
        return ticket

    def submit(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """Start the export; return a tensor for each result, not yet written.

        Args:
            inputs: The tensors, and then those whose first dimensions are the ticket and the numbers of rows.
        """
        keep_thread_state()
        tensors, (ticket, *rows) = inputs[:self._tensors], inputs[self._tensors:]
        shapes = [tensor.shape.as_list() for tensor in tensors]
        for shape, carrier in zip(shapes, rows, strict=False):
            shape[0] = carrier.shape[0]
        with tf.device(tensors[0].device):
            results = [gpu_eager.uninitialised(shape, tensor.dtype)
                       for shape, tensor in zip(shapes, tensors, strict=True)]
        handle = Handle(self._name + self._suffixes.pop(ticket.shape[0]))
        COMPLETIONS.attach(ticket.shape[0], handle)
        _exporter().put(lambda: self._export(tensors, results, handle))
        return results

    def _export(self, tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor], handle: Handle) -> None:
        """Submit the tensors; `handle` completes with their collective. Runs in the export thread."""
        try:
            if self._observer is not None:
                with at_once():
                    if not self._observer([tensor.numpy() for tensor in tensors]):
                        self._observer = None
            arrays = gpu_eager.with_results(tensors, results)
            request = dataclasses.replace(self._make_request(arrays), name=handle.name, device=DEVICE_GPU,
                                          in_graph=True)
            submitted = runtime.current().engine_of(request).submit(request, arrays)
        except Exception as error:  # The fetch raises it to the function's caller.
            handle.fail(error)
            return
        submitted.when_done(_pass_on, (submitted, handle))

    def fetch(self, ticket: np.int64) -> Arrays:
        """Return the shapes of the results, or raise the collective's error."""
        keep_thread_state()
        return [np.array(result.shape, np.int64) for result in COMPLETIONS.redeem(int(ticket)).wait()]


def _pass_on(pairs: list[tuple[Handle, Handle]]) -> None:
    """Complete the second handle of each pair with the results of the first."""
    complete = []
    for submitted, handle in pairs:
        try:
            complete.append((handle, submitted.wait(0)))
        except Exception as error:  # Likewise.
            handle.fail(error)
    complete_all(complete)


@cache
def _exporter() -> "queue.SimpleQueue[Callable[[], None]]":
    """The queue of the export thread, which calls its items in order. They wait for the GPU, never for another rank."""
    work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run_all() -> None:
        while True:
            work.get()()

    threading.Thread(target=run_all, name="mpistrat-gpu-export", daemon=True).start()
    return work
