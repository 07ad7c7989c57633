"""Collectives on eager tensors on a GPU: exported to the engine by DLPack, without a copy. For graphs see `gpu_graph`.

TensorFlow's export blocks the calling thread until the tensor's memory is ready, so a list of tensors costs one wait.
Memory for results is TensorFlow's own, in the order of its compute stream.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import tensorflow as tf

from ...api import runtime
from ...api.interop import AnyLibrary, go_by_host, gpu_input, this_ranks_gpu
from ...core.request import DEVICE_GPU, Request
from ...gpu.arrays import GpuArray, GpuInput
from .gpu_memory import exported, uninitialised
from .own_executor import at_once

if TYPE_CHECKING:
    from ...gpu.device import Device, Event  # It needs cupy.


class TensorFlow(AnyLibrary):
    """TensorFlow's eager tensors."""

    def to_gpu(self, value: tf.Tensor, device: "Device") -> GpuInput:
        array = exported(value, device)
        dtype, where = value.dtype, value.device

        def allocate(shape: tuple[int, ...]) -> "tuple[GpuArray, Event]":
            with at_once(), tf.device(where):
                return _as_result(uninitialised(shape, dtype), device)

        return gpu_input(array, device, device.complete(), allocate)


_LIBRARY = TensorFlow()


def are_on_gpu(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether all these eager tensors are reduced on the GPU. If one is in host memory, all go through the host.

    TensorFlow keeps some tensors (int32, mostly) in host memory although their device is a GPU. False too if the
    settings send GPU tensors through the host.
    """
    return (has_gpu() and bool(tensors) and all(":GPU:" in tensor.backing_device for tensor in tensors)
            and not go_by_host())


def run(make_request: Callable[[Sequence[GpuInput]], Request], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Run one collective on eager tensors of this rank's GPU and return as many results, on the same GPU. Collective.

    Args:
        make_request: Called with the tensors as GpuInputs.
        tensors: At least one.

    Raises:
        As `api.interop.tensor_of` and `AsyncResult.wait`.
    """
    device = device_of(tensors[0])
    with device.current():
        arrays = [_LIBRARY.to_gpu(tensor, device) for tensor in tensors]
    request = dataclasses.replace(make_request(arrays), device=DEVICE_GPU)
    results = runtime.current().engine_of(request).run(request, arrays).wait()
    return [result.owner for result in results]


def _as_result(made: tf.Tensor, device: "Device") -> "tuple[GpuArray, Event]":
    """An uninitialised tensor as a result array, and an event after the memory's previous use."""
    return dataclasses.replace(exported(made, device), owner=made), device.complete()


def device_of(tensor: tf.Tensor) -> "Device":
    """This rank's GPU, which an eager tensor is on. Raises as `api.interop.this_ranks_gpu`."""
    number = tf.DeviceSpec.from_string(tensor.backing_device).device_index or 0
    return this_ranks_gpu(cuda_number(number))


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
