"""Opens a GPU, and copies arrays to and from its memory, for the programs of this directory.

The functions work with cupy's Device and with the stand-in. They need neither pytest nor an MPI library.
"""

import sys
from typing import TYPE_CHECKING, cast

import numpy as np

from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.backend import await_on_host

if TYPE_CHECKING:
    from mpistrat.gpu.device import Device

LIMIT_S = 30.0
DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
          "float32", "float64", "complex64", "complex128"]


def open_device() -> "Device":
    """Return the first GPU. With --stand-in in the command line return the stand-in, to show that the program works."""
    if "--stand-in" in sys.argv:
        from tests.support.gpu_stand_in import Device as StandIn
        return cast("Device", StandIn())
    from mpistrat.gpu.device import Device
    return Device(0)


def can_test(dtype: str) -> bool:
    """Return whether numpy has the dtype here. Prints a line if not: bfloat16 needs ml_dtypes."""
    if dtype != "bfloat16":
        return True
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        print("not tested: bfloat16, for ml_dtypes is not installed")
        return False
    return True


def scratch(device: "Device", nbytes: int) -> GpuArray:
    """Allocate GPU memory. Raises AssertionError if there is not enough."""
    made = device.scratch(nbytes)
    assert made is not None, f"no {nbytes} bytes of GPU memory are left"
    return made


def upload(device: "Device", values: np.ndarray, shift: int = 0) -> GpuArray:
    """Copy values to new GPU memory, `shift` bytes after an aligned address."""
    memory = scratch(device, values.nbytes + shift + 64)
    staged, stream = device.pinned(max(values.nbytes, 1)), device.stream()
    staged[:values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    device.copy(memory.address + shift, staged.ctypes.data, values.nbytes, stream)
    await_on_host(device.record(stream), LIMIT_S)
    return GpuArray(memory.address + shift, values.shape, values.dtype, memory)


def download(device: "Device", array: GpuArray) -> np.ndarray:
    staged, stream = device.pinned(max(array.nbytes, 1)), device.stream()
    device.copy(staged.ctypes.data, array.address, array.nbytes, stream)
    await_on_host(device.record(stream), LIMIT_S)
    return np.asarray(staged[:array.nbytes].view(array.dtype).reshape(array.shape).copy())
