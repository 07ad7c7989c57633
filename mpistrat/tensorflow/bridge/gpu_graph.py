"""Collectives on tensors on a GPU inside a tf.function: the tensors stay on the GPU.

A collective consists of four nodes, which divide the work differently from the three in `cpu`:

1. *pack*, a py_function on the GPU, which gets the tensors as eager tensors. It copies them into memory that the engine
   knows (see `gpu_memory`), where they are reduced in place. It waits for nothing: it only enqueues the copies on
   TensorFlow's compute stream.
2. *submit*, a callback on the host. An input of it is a *mark*, a small tensor on the GPU that pack returns. TensorFlow
   copies it to the host behind the work of its compute stream, and blocks no thread meanwhile. So submit is called when
   the copies are complete. It submits them, and returns a ticket.
3. *await*, as in `cpu`.
4. *fetch*, a py_function on the GPU that returns the results without a copy, or raises.

No node but fetch returns a result. If an earlier node did, and a later one held it back, TensorFlow's optimizer could
remove the later one: it does so with an identity, a reshape or a cast, depending on what follows
(https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/grappler/optimizers/arithmetic_optimizer.cc#L2038).

Numbers travel between the host and nodes on the GPU as dimensions of tensors without elements, because shapes are on
the host: to pack the numbers of gathered rows, to submit the number of the pack (the *key*), and to fetch the ticket.
The key is an input of fetch too, so it shows whether the results may still be fetched.

TensorFlow runs stateful nodes in program order, and where that order leads from a node on the GPU to one on the host,
it waits for the GPU. If pack took part in it, each pack would wait until the GPU has done the one before, and stand
behind all of backprop in the compute stream. So pack and fetch are each in a function of its own, which is called as
stateless.

TensorFlow's placer chooses the device of a tensor after the function has been traced, when the graph cannot change any
more. So `device_of` decides from what is known during tracing.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import cache
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from ...api import runtime
from ...api.interop.own_gpu import go_by_host, gpu_input
from ...core.request import on_gpu
from ...gpu.arrays import GpuArray, GpuInput
from ..async_op import call_site
from ..types import Arrays
from ..xla import context as xla
from . import cpu, execution_ids, gpu_eager
from .completion import COMPLETIONS, TICKET, awaited, execution_of
from .execution_ids import Execution
from .gpu_memory import Shared, as_row, copied, from_row, shared, without_elements
from .program_order import in_order
from .python_op import host_call, keep_thread_state, unordered_tensor_call
from .submission import CollectiveCallSite, MakeRequest, Observer
from .sync_execution import SynchronousExecution


class _Lifetime:
    """The owner of a key, which exists until no node can fetch the results any more.

    Attributes:
        ticket: The ticket's memory. As long as something refers to it, the results do not count as abandoned (see
            `completion`). TensorFlow's references alone end before fetch begins, since it gets a copy on the GPU.
    """

    ticket: Arrays


@dataclasses.dataclass(frozen=True)
class _Pack:
    """The tensors of one execution, and memory for its results, all as rows (see gpu_memory.as_row)."""

    copies: list[Shared]
    results: list[Shared]
    lifetime: _Lifetime


_numbers = itertools.count(1)  # of packs
# Packs that have not been submitted, by number. If an execution fails in between, they are freed with the runtime.
_packed: "WeakKeyDictionary[runtime.Runtime, dict[int, _Pack]]" = WeakKeyDictionary()


def device_of(tensors: Sequence[tf.Tensor]) -> str | None:
    """The GPU on which tensors of a graph are reduced; None: they go through the host, or XLA compiles the graph.

    They stay on the GPU if there is one, none of them is placed on the CPU, and all have floating-point or complex
    dtypes, as gradients do: others TensorFlow has no GPU kernels for, or keeps on the host. A tensor that turns out to
    be on the host is copied.
    """
    if tf.executing_eagerly() or not gpu_eager.has_gpu() or xla.is_compiled():
        return None
    if not gpu_eager.has_cupy() or go_by_host():
        return None
    if not all(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        return None
    places = {tf.DeviceSpec.from_string(tensor.device) for tensor in tensors if tensor.device}
    if any(place.device_type not in (None, "GPU") for place in places):
        return None
    numbers = {place.device_index or 0 for place in places} or {0}
    return f"/device:GPU:{numbers.pop()}" if len(numbers) == 1 else None


def run(device: str, name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape], process_set: int = 0, rows: Sequence[tf.Tensor] = (),
        observer: Observer | None = None) -> list[tf.Tensor]:
    """Run one collective in a graph, as `cpu.run`; the results are on the same device. Collective.

    Args:
        device: The result of `device_of`.
        name, tensors, shapes, process_set: As in `cpu.run`.
        make_request: Called with the tensors as GpuInputs.
        rows: The first dimension of each result, int64 on the host. By default each tensor is reduced in place.
        observer: Called with copies on the host before the submit.
    """
    cpu.require_function()
    if call_site.is_used(device, process_set):
        return call_site.run(device, name, make_request, tensors, shapes, process_set, observer=observer)
    execution = execution_ids.current.get() or Execution()
    site = _GpuCallSite(name, process_set, make_request, [t.dtype for t in tensors], execution, observer)
    past = [execution.number] if execution.is_past else []
    COMPLETIONS.prepare()
    with tf.device("CPU:0"):
        shapes_of_carriers = [tf.stack([size, 0]) for size in rows]
    with tf.device(device):
        carriers = [tf.reshape(tf.zeros([0]), shape) for shape in shapes_of_carriers]
        of_rows = [as_row(tensor) for tensor in tensors]
        key, mark = unordered_tensor_call(site.pack, [*of_rows, *carriers], [tf.float32, tf.float32], device)
        shape_of_key = tf.shape(key, tf.int64)
    with tf.device("CPU:0"):
        ticket = cpu.scalars(in_order(lambda: host_call(site.submit, [shape_of_key, mark, *past], TICKET,
                                                        stateful=True)))
        site.belongs_to(ticket[0].op)
        shape_of_carrier = tf.concat([ticket[0][tf.newaxis], awaited(ticket)], axis=0)
    with tf.device(device):
        carrier = tf.reshape(tf.zeros([0]), shape_of_carrier)
        fetched = unordered_tensor_call(site.fetch, [key, carrier], [row.dtype for row in of_rows], device)
        results = [from_row(row, t.dtype) for row, t in zip(fetched, tensors, strict=True)]
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)
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
    if call_site.is_used(device, process_set):
        return call_site.run(device, name, make_request, tensors, shapes, process_set, False, observer)

    with tf.device("CPU:0"):
        own = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
        # The same name as on ranks whose tensors are on the host, so that all ranks get the mismatch error.
        rows, = cpu.run(name, make_request, [own[tf.newaxis]], [tf.TensorShape([None, len(tensors)])], process_set)
        totals = tf.unstack(tf.reduce_sum(rows, axis=0))
    return run(device, f"{name}/on GPUs", make_request, tensors, shapes, process_set, totals, observer)


class _GpuCallSite(CollectiveCallSite):
    """The callbacks of one collective on GPU tensors in a graph; see cpu._CpuCallSite."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, dtypes: Sequence[tf.DType],
                 execution: Execution, observer: Observer | None):
        super().__init__(name, process_set, lambda arrays: on_gpu(make_request(arrays)), execution, observer)
        self._dtypes = [np.dtype(dtype.as_numpy_dtype) for dtype in dtypes]

    def pack(self, *inputs: tf.Tensor) -> list[tf.Tensor]:
        """Start to copy the tensors; return the key and the mark.

        Args:
            inputs: The tensors, each as a row, and then those whose first dimensions are the numbers of gathered rows.
        """
        keep_thread_state()
        tensors, carriers = inputs[:len(self._dtypes)], inputs[len(self._dtypes):]
        device = gpu_eager.device_at(tensors[0].backing_device)
        with SynchronousExecution(), tf.device(tensors[0].backing_device):
            copies = results = [copied(tensor, device) for tensor in tensors]
            if carriers:
                results = [shared([1, carrier.shape[0], *tensor.shape[2:]], tensor, device)
                           for tensor, carrier in zip(tensors, carriers, strict=True)]
            number, lifetime = next(_numbers), _Lifetime()
            key = without_elements([number, 0], lifetime, tensors[0], device)
        _packed.setdefault(runtime.current(), {})[number] = _Pack(copies, results, lifetime)
        return [key, _mark(tensors[0].backing_device)]

    def submit(self, shape_of_key: np.ndarray, mark: np.ndarray, *past: np.int64) -> Arrays:
        """Submit the tensors, which are complete; return a ticket for the results."""
        del mark  # Its value has no meaning. Its arrival shows that the copies are complete.
        pack = _packed[runtime.current()].pop(int(shape_of_key[0]))
        arrays = [_input(copy, result, dtype)
                  for copy, result, dtype in zip(pack.copies, pack.results, self._dtypes, strict=True)]

        def on_host() -> list[np.ndarray]:
            with SynchronousExecution():
                return [copy.tensor.numpy().view(array.dtype).reshape(array.shape)
                        for copy, array in zip(pack.copies, arrays, strict=True)]

        its = self.submission(arrays, int(past[0]) if past else None, on_host)
        handle = its.group.engine.submit(its.request, its.arrays, self.origin)
        pack.lifetime.ticket = COMPLETIONS.ticket_for(handle, its.number)
        return pack.lifetime.ticket

    def fetch(self, key: tf.Tensor, carrier: tf.Tensor) -> list[tf.Tensor]:
        """Return the results, or raise the collective's error.

        Args:
            key: That of the pack. It is not read.
            carrier: Its first dimension is the ticket.
        """
        keep_thread_state()
        return [result.owner for result in COMPLETIONS.redeem(carrier.shape[0]).wait()]


def _input(copy: Shared, result: Shared, dtype: np.dtype) -> GpuInput:
    """A complete copy as the engine's input, with memory for the result, which is the same one in place."""
    target = dataclasses.replace(_tensor_in(result, dtype), owner=result.tensor)
    return gpu_input(_tensor_in(copy, dtype), copy.device, None, lambda _: (target, None))


def _tensor_in(row: Shared, dtype: np.dtype) -> GpuArray:
    """The memory of a tensor of this dtype, which a row has."""
    array = row.array
    return dataclasses.replace(array, dtype=dtype, shape=array.shape[1:] if array.dtype == dtype else array.shape[1:-1])


@cache
def _mark(device: str) -> tf.Tensor:
    with SynchronousExecution(), tf.device(device):
        return tf.zeros([1])
