"""Memory that TensorFlow and the engine share, without an export of TensorFlow's tensors.

An export by DLPack gives the address of a tensor, but it waits for all work on the GPU, and holds Python's lock
meanwhile. The other direction waits for nothing: TensorFlow imports memory of cupy, whose address is known, and copies
a tensor into it on its own compute stream. The engine reduces the copy in place, and the imported tensor is the result.

TensorFlow gives the memory back when the last reference to the tensor is gone. Work on its compute stream may then
still read it. The next use is safe, since it begins with TensorFlow's copy, on the same stream, or after a wait for it.
Called by gpu_eager.py and gpu_graph.py, in TensorFlow's threads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from ...core.memory import ALIGNMENT
from ...gpu.arrays import GpuArray
from ...gpu.dlpack import array_of, lend

if TYPE_CHECKING:
    from ...gpu.device import Device  # It needs cupy.

_EMPTY = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
# InplaceUpdate has no kernel for complex numbers on a GPU.
_PARTS = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def as_row(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of a graph in the form that `copied` takes: with one dimension more, of size 1, in front.

    A complex one becomes pairs of floating-point numbers. In an eager call, which holds Python's lock, the same takes
    50 us.
    """
    row = tf.expand_dims(tensor, 0)
    return tf.bitcast(row, _PARTS[row.dtype]) if row.dtype in _PARTS else row


def from_row(row: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The tensor of this dtype that `as_row` was given, or one of another shape in the same form."""
    return tf.squeeze(tf.bitcast(row, dtype) if dtype in _PARTS else row, 0)


@dataclass(frozen=True)
class Shared:
    """An eager tensor in memory that the engine may read and write.

    Attributes:
        tensor: The tensor.
        device: This rank's GPU.
        imported: The memory; None if it is TensorFlow's own, because cupy could allocate none.
    """

    tensor: tf.Tensor
    device: "Device"
    imported: GpuArray | None

    @property
    def array(self) -> GpuArray:
        """The memory. If it is TensorFlow's own, this waits for the GPU, as `exported`."""
        return self.imported or exported(self.tensor, self.device)


def shared(shape: Sequence[int], like: tf.Tensor, device: "Device") -> Shared:
    """Return an uninitialised tensor of the dtype and on the device of an eager tensor `like`. Waits for nothing.

    Others than TensorFlow's compute stream may write the memory only after a wait for that stream.
    """
    dtype = np.dtype(like.dtype.as_numpy_dtype)
    with device.current():
        memory = device.lendable(max(math.prod(shape) * dtype.itemsize, 1))
    if memory is None:
        with tf.device(like.backing_device):
            return Shared(uninitialised(shape, like.dtype), device, None)
    array = GpuArray(memory.address, tuple(shape), dtype, memory.owner)
    return Shared(_imported(array, like, device), device, array)


def without_elements(shape: Sequence[int], owner: object, like: tf.Tensor, device: "Device") -> tf.Tensor:
    """Return a float32 tensor without elements on the device of an eager tensor `like`. Waits for nothing.

    TensorFlow refers to the owner as long as an eager tensor or a running graph refers to the tensor.
    """
    return _imported(GpuArray(ALIGNMENT, tuple(shape), np.dtype(np.float32), owner), like, device)  # Any address does.


def _imported(array: GpuArray, like: tf.Tensor, device: "Device") -> tf.Tensor:
    # The number of the logical device, by which TensorFlow finds a device.
    number = tf.DeviceSpec.from_string(like.backing_device).device_index or 0
    return lend(array, device.dlpack_type, number, tf.experimental.dlpack.from_dlpack)


def copied(row: tf.Tensor, device: "Device") -> Shared:
    """Return a copy of an eager tensor of `as_row`, which TensorFlow's compute stream makes. Waits for nothing.

    Call it where the current device is that of the tensor.
    """
    made = shared(row.shape, row, device)
    # In TensorFlow only this operation writes into memory that others refer to. It writes rows, here the only one.
    tf.raw_ops.InplaceUpdate(x=made.tensor, i=_first_row(row.backing_device), v=row)
    return made


@cache
def _first_row(device: str) -> tf.Tensor:
    """The index of the first row, in the memory of the device."""
    with tf.device(device):
        return tf.cast(tf.zeros([1]), tf.int32)  # An int32 that is not computed on the GPU would be on the host.


def exported(tensor: tf.Tensor, device: "Device") -> GpuArray:
    """The memory of an eager tensor.

    Blocks until the GPU has done all that TensorFlow has enqueued on its compute stream, and holds Python's lock.
    """
    return array_of(tf.experimental.dlpack.to_dlpack(tensor), np.dtype(tensor.dtype.as_numpy_dtype),
                    device.dlpack_type)


def uninitialised(shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
    """A tensor on the current device, whose contents the caller overwrites. Eager only.

    On a GPU TensorFlow has the Empty operation for a few dtypes only, and would place others on the host. So the others
    are filled with zeros.
    """
    if dtype in _EMPTY:
        return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False)
    return tf.zeros(shape, dtype)
