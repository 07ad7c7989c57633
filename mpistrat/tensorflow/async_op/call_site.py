"""Collectives on GPU tensors, in graphs and eager: one asynchronous operation each.

TensorFlow calls the operation's kernel when the GPU work that computes the inputs is enqueued. The kernel passes the
addresses of inputs and outputs to the engine, with a CUDA event that follows that work, and returns without waiting. If
the size of an output depends on other ranks, the output is allocated when the engine knows the size. The operation is
complete when the engine has enqueued the collective and has made TensorFlow's stream wait for it. If the stream cannot
wait (see streams.py), the operation is complete when the GPU is done. So no node reads a result too early.

Collectives of one name run one after the other, because their nodes share a resource as an input. Those of different
names start in any order. `program_order.complete_in_order` makes later nodes wait for a result. In the gradient of a
function, which cannot capture the resource, names contain the number of the execution, as on the CPU (graph/cpu.py).

TensorFlow cannot cancel the operation. If another node of an execution fails, the execution still ends only when its
collectives are complete, or when the engine fails them because other ranks have not submitted them in time.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...api.tensors import go_by_host, host_copies_of
from ...core.request import on_gpu
from ...gpu.arrays import Allocated, BucketList, GpuTensors
from ..bridge import gpu_device
from ..bridge.gpu_device import device_at
from ..bridge.program_order import Execution, after_completed, current_execution, resource_of_name, session_graph
from ..xla import context as xla
from . import kernel, session_node, streams
from .kernel import Memory
from .submission import AsyncCallSite, Executions, MakeRequest, Observer

logger = logging.getLogger(__name__)


def are_on_gpu(tensors: Sequence[tf.Tensor], process_set: int = 0) -> bool:
    """Return whether these eager tensors are reduced on the GPU. If one is in host memory, all are reduced on the CPU.

    TensorFlow keeps some tensors, mostly of int32, in host memory although it calls their device a GPU.
    """
    return (gpu_device.has_gpu() and bool(tensors) and all(":GPU:" in tensor.backing_device for tensor in tensors)
            and _is_used(tensors[0].backing_device, process_set))


def device_of(tensors: Sequence[tf.Tensor], process_set: int = 0) -> str | None:
    """Return the GPU on which tensors of a graph are reduced; None if the host reduces them or XLA compiles the graph.

    Tensors are reduced on the GPU if there is one, no tensor is placed on the CPU, and all have floating-point or
    complex dtypes, as gradients do. For other dtypes TensorFlow has no GPU kernels, or keeps the tensors on the host.
    TensorFlow places the tensors after tracing. If it places one on the host after all, it also adds a copy to the GPU.
    """
    if tf.executing_eagerly() or not gpu_device.has_gpu() or xla.is_compiled():
        return None
    if not all(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        return None
    places = {tf.DeviceSpec.from_string(tensor.device) for tensor in tensors if tensor.device}
    if any(place.device_type not in (None, "GPU") for place in places):
        return None
    numbers = {place.device_index or 0 for place in places} or {0}
    if len(numbers) > 1:
        return None
    where = f"/device:GPU:{numbers.pop()}"
    return where if _is_used(where, process_set) else None


def _is_used(where: str, process_set: int) -> bool:
    """Return whether the GPU `where` reduces its tensors. The first call tests the GPU, and may log a warning."""
    if go_by_host():
        return False
    if reason := gpu_device.why_no_gpu(where) or kernel.why_not():
        _warn_once(runtime.current().topology.rank, reason)
        return False
    return streams.stream_for(device_at(where), where, process_set) is not None


@cache
def _warn_once(rank: int, reason: str) -> None:
    logger.warning(streams.BY_HOST, rank, reason)


def run(where: str, name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape], process_set: int = 0, keeps_shapes: bool = True,
        observer: Observer | None = None, bucket: tuple[BucketList, int] | None = None) -> list[tf.Tensor]:
    """Add one collective on GPU tensors to a graph, as `cpu.run` does; return results on the same GPU. Collective.

    Args:
        where: The device of the tensors.
        name, tensors, shapes, process_set: As in `cpu.run`.
        make_request: Called with the tensors as GpuTensors.
        keeps_shapes: Whether each result has the shape of its tensor.
        observer: Called with copies of the tensors in host memory, before the collective is submitted.
        bucket: If `tensors` are one of several buckets of a list: that list, and the index of this bucket.
            Ignored in a session, because a run of a session may execute only some of the buckets.
    """
    in_session = None if session_graph() is None else Executions()
    execution = current_execution.get() or Execution()
    if in_session is None:
        past, counts = [execution.number] if execution.is_past else [], execution.number is None
        orders = resource_of_name(where, name)
    else:
        past, counts, orders = session_node.number_of_execution(), False, []
    site = _GpuCallSite(name, process_set, make_request, execution, observer, in_session, where, tensors,
                        1 + len(past) + len(orders), keeps_shapes, bucket if in_session is None else None)
    with after_completed() if in_session is None else nullcontext(), tf.device(where):
        outputs = kernel.node(site, tensors, past, orders, int(counts))
    site.belongs_to(outputs[0].op)
    if in_session is not None:
        session_node.watch()
    if counts:
        execution.number = outputs.pop()
        execution.number.set_shape([])
    for result, shape in zip(outputs, shapes, strict=True):
        result.set_shape(shape)
    return outputs


def run_eagerly(make_request: MakeRequest, tensors: Sequence[tf.Tensor], keeps_shapes: bool,
                process_set: int) -> list[tf.Tensor]:
    """Run one collective on eager tensors of this rank's GPU, and return results on the same GPU. Collective.

    TensorFlow only returns addresses and allocates the results. When this function returns, the GPU work of the
    collective is enqueued or complete. Raises the errors of `api.tensors.this_ranks_gpu` and `AsyncResult.wait`.
    """
    def lent(shapes: Sequence[tuple[int, ...]] | None) -> Memory:
        with tf.init_scope():  # The thread that drives the engine may be tracing a function.
            return kernel.lent(tensors, shapes)

    dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in tensors]
    arrays = _on_gpu(tensors[0].backing_device, process_set, dtypes, tensors, lent, keeps_shapes)
    request = on_gpu(make_request(arrays))
    # If this raises, as a signal handler may, the engine may still use the memory, and keeps it.
    results: list[tf.Tensor] = runtime.group_of(request.name, process_set).engine.run(request, arrays).wait()
    return results


def _on_gpu(where: str, process_set: int, dtypes: Sequence[np.dtype], owner: object,
            memory: Callable[[Sequence[tuple[int, ...]] | None], Memory], keeps_shapes: bool) -> GpuTensors:
    """Return the tensors of a collective on the GPU `where`, in the engine's form. `owner` keeps the tensors alive.

    `memory`: Allocates results of the given shapes. `memory(None)` allocates results with the shapes of the tensors,
        and `memory(())` allocates none yet. Both also return the addresses and shapes of the tensors themselves.
    """
    device = device_at(where)
    found = streams.stream_for(device, where, process_set)
    assert found is not None, "_is_used has found one"
    stream, reader = found

    def allocate(shapes: Sequence[tuple[int, ...]]) -> Allocated:
        made = memory(shapes)
        return Allocated(made.targets, made.results, stream)

    with device.current():
        own = memory(None if keeps_shapes else ())
        tensors = GpuTensors(device, own.sources, own.shapes, dtypes, owner, [stream],
                             None if reader is None else [reader], allocate)
        tensors.prepare(keeps_shapes=False)  # After the results: earlier work may still use their memory.
    if keeps_shapes:
        tensors.made = Allocated(own.targets, own.results, None)
    return tensors


class _GpuCallSite(AsyncCallSite):
    """The object that the node of one collective calls in Python. Several executions may be in flight at once."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, execution: Execution,
                 observer: Observer | None, in_session: Executions | None, where: str, tensors: Sequence[tf.Tensor],
                 first: int, keeps_shapes: bool, bucket: tuple[BucketList, int] | None):
        super().__init__(name, process_set, lambda arrays: on_gpu(make_request(arrays)),
                         execution if in_session is None else None, observer, in_session, tensors, first)
        self._where, self._keeps_shapes, self._bucket = where, keeps_shapes, bucket
        self._nothing = [None] * len(tensors)

    def compute(self, call: kernel.Call) -> None:
        def memory(shapes: Sequence[tuple[int, ...]] | None) -> Memory:
            if shapes:
                return Memory([], [], [call.output(i, shape) for i, shape in enumerate(shapes)], self._nothing)
            return Memory(*call.exchange(self._first, self._dims, shapes is None), self._nothing)

        def fetched() -> Sequence[np.ndarray]:
            return host_copies_of(device_at(self._where)).fetched(arrays)

        arrays = _on_gpu(self._where, self.process_set, self._dtypes, call, memory, self._keeps_shapes)
        arrays.bucket = self._bucket
        self.submit(call, arrays, fetched)
