"""Eager tensors on a GPU: handed to the engine by DLPack, without a visit to the host. For graphs see `gpu_graph`.

TensorFlow's own export waits on the host until a tensor's memory is ready, so tensors that follow each other cost one
wait. Memory for results is TensorFlow's own, in the order of its compute stream.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import tensorflow as tf

from ...api import runtime
from ...api.interop import AnyLibrary, as_result, go_by_host, gpu_input, this_ranks_gpu
from ...core.request import DEVICE_GPU, Request
from ...gpu.arrays import GpuArray, GpuInput
from .own_executor import at_once


class TensorFlow(AnyLibrary):
    """TensorFlow's eager tensors."""

    def to_gpu(self, value: Any, device: Any) -> GpuInput:
        array, ready = device.imported(value)
        dtype, where = value.dtype, value.device

        def allocate(shape: tuple[int, ...]) -> tuple[GpuArray, Any]:
            with at_once(), tf.device(where):
                return as_result(uninitialised(shape, dtype), device)

        return gpu_input(device.seen(array), device, ready, allocate)


_LIBRARY = TensorFlow()
_PLAIN = (tf.float16, tf.float32, tf.float64)


def are_on_gpu(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether the memory of all these eager tensors is a GPU's; one on the host takes the others along to the host.

    TensorFlow keeps some (int32, mostly) in host memory although they are said to be on a GPU. False too where all are
    to be taken to the host.
    """
    return (has_gpu() and bool(tensors) and all(":GPU:" in tensor.backing_device for tensor in tensors)
            and not go_by_host())


def run(make_request: Callable[[list[Any]], Request], tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Run one collective on eager tensors of this rank's GPU and return as many results, on the same. Collective.

    Args:
        make_request: Called with the tensors as GpuInputs.
        tensors: At least one.

    Raises:
        As `tensor_kinds.tensor_of` and `AsyncResult.wait`.
    """
    device = _device_of(tensors[0])
    with device.current():
        arrays = [_LIBRARY.to_gpu(tensor, device) for tensor in tensors]
    request = dataclasses.replace(make_request(arrays), device=DEVICE_GPU)
    results = runtime.current().engine.run(request, arrays).wait()
    return [result.owner for result in results]


def uninitialised(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """A tensor on the current device, whose contents are to be written. Eager only.

    On a GPU TensorFlow has the operation for that for few dtypes; others are filled with zeros, for one on the host
    would be of no use.
    """
    if dtype in _PLAIN:
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)
    return tf.zeros(shape, dtype)


def with_results(tensors: Sequence[tf.Tensor], results: Sequence[tf.Tensor]) -> list[GpuInput]:
    """Eager tensors of this rank's GPU for the engine, with as many others that the results go to. Waits for the GPU.

    Raises:
        As `tensor_kinds.tensor_of`.
    """
    device, arrays = _device_of(tensors[0]), []
    with device.current():
        for tensor, result in zip(tensors, results, strict=True):
            array, ready = device.imported(tensor)
            made = as_result(result, device)
            arrays.append(gpu_input(device.seen(array), device, ready, lambda _, made=made: made))
    return arrays


def _device_of(tensor: tf.Tensor) -> Any:
    number = tf.DeviceSpec.from_string(tensor.backing_device).device_index or 0
    return this_ranks_gpu(_as_cuda_counts(number))


def _as_cuda_counts(number: int) -> int:
    """The number of TensorFlow's logical GPU among those that CUDA shows to this process."""
    visible = tf.config.get_visible_devices("GPU")
    physical = tf.config.list_physical_devices("GPU")
    return physical.index(visible[number]) if number < len(visible) else number


@cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU."""
    # Asked once: to ask each tensor takes a microsecond, which is much on a machine without a GPU.
    return len(tf.config.list_physical_devices("GPU")) > 0
