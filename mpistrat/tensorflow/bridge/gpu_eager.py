"""Collectives on eager tensors on a GPU: exported to the engine by DLPack, without a copy. For graphs see `gpu_graph`.

TensorFlow's export blocks the calling thread until the GPU has done the work on TensorFlow's compute stream, so a list
of tensors costs one wait. The caller waits for the collective in any case.

Results are memory that TensorFlow imports (see `gpu_memory`). It is allocated before the exports: when these have
waited, no earlier work still reads the memory, and so the engine need not wait for TensorFlow's stream. Only a result
whose size depends on the other ranks (of a gather) is allocated later, in memory of TensorFlow's own, and exported too.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import tensorflow as tf

from ...api import runtime
from ...api.interop.own_gpu import go_by_host, gpu_input, this_ranks_gpu, why_no_cupy
from ...core.request import Request, on_gpu
from ...gpu.arrays import Allocated, GpuArray, GpuInput
from .gpu_memory import exported, shared, uninitialised
from .sync_execution import SynchronousExecution

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

logger = logging.getLogger(__name__)


def are_on_gpu(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether all these eager tensors are reduced on the GPU. If one is in host memory, all go through the host.

    TensorFlow keeps some tensors (int32, mostly) in host memory although their device is a GPU. False too if cupy is
    missing, or the settings send GPU tensors through the host.
    """
    return (has_gpu() and bool(tensors) and all(":GPU:" in tensor.backing_device for tensor in tensors)
            and has_cupy() and not go_by_host())


@cache
def has_cupy() -> bool:
    """Whether the engine can read tensors on a GPU, eager ones and those of graphs. Warns once if not."""
    reason = why_no_cupy()
    if reason:
        logger.warning("rank %d: TensorFlow's tensors on a GPU are copied to the host, since cupy is missing: %s",
                       runtime.current().topology.rank, reason)
    return not reason


def run(make_request: Callable[[Sequence[GpuInput]], Request], tensors: Sequence[tf.Tensor],
        shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    """Run one collective on eager tensors of this rank's GPU and return as many results, on the same GPU. Collective.

    Args:
        make_request: Called with the tensors as GpuInputs.
        tensors: At least one.
        shapes: The shape of each result, as far as it is known before the collective.

    Raises:
        As `api.interop.own_gpu.this_ranks_gpu` and `AsyncResult.wait`.
    """
    device = device_at(tensors[0].backing_device)
    with device.current(), SynchronousExecution():
        results = [_result(shape, tensor, device) for shape, tensor in zip(shapes, tensors, strict=True)]
        arrays = [_input(tensor, result, device) for tensor, result in zip(tensors, results, strict=True)]
    request = on_gpu(make_request(arrays))
    group = runtime.group_of(request.name, request.process_set)
    return [result.owner for result in group.engine.run(request, arrays).wait()]


def _result(shape: tf.TensorShape, like: tf.Tensor, device: "Device") -> GpuArray | None:
    """Memory for a result, owned by the tensor that the caller gets; None if the shape is not known."""
    if not shape.is_fully_defined():
        return None
    made = shared(shape.as_list(), like, device)
    return dataclasses.replace(made.array, owner=made.tensor)


def _input(tensor: tf.Tensor, result: GpuArray | None, device: "Device") -> GpuInput:
    """A tensor as the engine's input. Waits until it is complete."""
    dtype, where = tensor.dtype, tensor.device

    def allocate(shape: tuple[int, ...]) -> Allocated:
        if result is not None and result.shape == shape:
            return result, None
        with SynchronousExecution(), tf.device(where):
            made = uninitialised(shape, dtype)
            return dataclasses.replace(exported(made, device), owner=made), None

    return gpu_input(exported(tensor, device), device, None, allocate)


def device_at(where: str) -> "Device":
    """This rank's GPU, by TensorFlow's name of it. Raises as `api.interop.own_gpu.this_ranks_gpu`."""
    return this_ranks_gpu(cuda_number(tf.DeviceSpec.from_string(where).device_index or 0))


def cuda_number(number: int) -> int:
    """The CUDA device number of TensorFlow's logical GPU `number`, which its DLPack capsules name.

    TensorFlow numbers physical GPUs as CUDA does. It makes one logical GPU of each visible physical one, or as many as
    the script has configured, in the order of the physical ones, whatever the order in set_visible_devices
    (`_compute_device_options` in TensorFlow's eager/context.py).
    """
    physical, visible = tf.config.list_physical_devices("GPU"), tf.config.get_visible_devices("GPU")
    logical = [i for i, gpu in enumerate(physical) if gpu in visible
               for _ in tf.config.get_logical_device_configuration(gpu) or [None]]
    return logical[number] if number < len(logical) else number


@cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    # Cached: the call takes a microsecond per tensor, which matters on a machine without a GPU.
    return len(tf.config.list_physical_devices("GPU")) > 0
