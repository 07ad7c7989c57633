"""A GPU's memory for the programs of this directory, by the methods that cupy's device and the stand-in have.

These programs need neither pytest nor an MPI library.
"""

import sys
from typing import Any

import numpy as np

from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.backend import await_on_host

LIMIT_S = 30.0
DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16",
          "float32", "float64", "complex64", "complex128"]


def open_device() -> Any:
    """The first GPU; with --stand-in in the command line the stand-in, which shows that the program itself runs."""
    if "--stand-in" in sys.argv:
        from tests.support.gpu_stand_in import Device as StandIn
        return StandIn()
    from mpistrat.gpu.device import Device
    return Device(0)


def can_test(dtype: str) -> bool:
    """Whether numpy knows the dtype here: bfloat16 comes with ml_dtypes. Says so if not."""
    if dtype != "bfloat16":
        return True
    try:
        import ml_dtypes  # noqa: F401
    except ImportError:
        print("not tested: bfloat16, for ml_dtypes is not installed")
        return False
    return True


def upload(device: Any, values: np.ndarray, shift: int = 0) -> GpuArray:
    """Copy values to the GPU, to `shift` bytes after an aligned address."""
    memory = device.scratch(values.nbytes + shift + 64)
    assert memory is not None, "the GPU has no memory left"
    staged, stream = device.pinned(max(values.nbytes, 1)), device.stream()
    staged[:values.nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    device.copy(memory.address + shift, staged.ctypes.data, values.nbytes, stream)
    await_on_host(device.record(stream), LIMIT_S)
    return GpuArray(memory.address + shift, values.shape, values.dtype, memory)


def download(device: Any, array: GpuArray) -> np.ndarray:
    staged, stream = device.pinned(max(array.nbytes, 1)), device.stream()
    device.copy(staged.ctypes.data, array.address, array.nbytes, stream)
    await_on_host(device.record(stream), LIMIT_S)
    return np.asarray(staged[:array.nbytes].view(array.dtype).reshape(array.shape).copy())
