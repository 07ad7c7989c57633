"""DLPack capsules, read and made by ctypes: for libraries that cupy cannot exchange tensors with. Needs no GPU.

cupy.from_dlpack passes a stream, which TensorFlow refuses, takes the number of the capsule's device for CUDA's, which
with TensorFlow is the number of a logical device, and refuses bfloat16. The capsules are those of DLPack before 1.0
("dltensor"), which all libraries know; https://dmlc.github.io/dlpack/latest/c_api.html. Any thread may call the
functions.
"""

import atexit
import ctypes
import math
from collections.abc import Callable
from ctypes import POINTER, Structure, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import TypeVar

import numpy as np

from .arrays import GpuArray

T = TypeVar("T")

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA

NAME = b"dltensor"  # A consumer renames the capsule to "used_dltensor", and then owns the tensor.
_BFLOAT, _BOOL = 4, 6
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": _BOOL}  # by the kind of a numpy dtype


class DLTensor(Structure):
    """DLPack's struct of the same name, with DLDevice and DLDataType inlined."""

    _fields_ = [("data", c_void_p), ("device_type", c_int32), ("device_id", c_int32), ("ndim", c_int32),
                ("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16), ("shape", POINTER(c_int64)),
                ("strides", POINTER(c_int64)), ("byte_offset", c_uint64)]


class DLManagedTensor(Structure):
    """DLPack's struct of the same name. The consumer calls `deleter` with its address, if it is not null."""

    _fields_ = [("tensor", DLTensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


def array_of(capsule: object, dtype: np.dtype, device_type: int) -> GpuArray:
    """Return the array that a capsule describes, with the capsule as owner. The capsule stays unconsumed.

    When the array is deleted, so is the capsule, and its destructor releases the tensor.

    Args:
        capsule: A PyCapsule "dltensor".
        dtype: The dtype of the elements: numpy alone does not know all.
        device_type: The type of the device that the tensor has to be on: CPU or CUDA.

    Raises:
        BufferError: The tensor is on another type of device, has another dtype, or is not C-contiguous.
        ValueError: The capsule has another name, because it has been consumed or is none of DLPack before 1.0.
    """
    tensor = struct_of(capsule).tensor
    shape = tuple(tensor.shape[:tensor.ndim])
    if tensor.device_type != device_type:
        raise BufferError(f"the tensor is on a device of DLPack's type {tensor.device_type}, not {device_type}")
    if (tensor.code, tensor.bits, tensor.lanes) != (code_of(dtype), 8 * dtype.itemsize, 1):
        raise BufferError(f"the tensor's elements have DLPack's type {tensor.code}, {tensor.bits} bits, {tensor.lanes} "
                          f"lanes, which is not {dtype}")
    if tensor.strides and not _is_contiguous(shape, tensor.strides[:tensor.ndim]):
        raise BufferError(f"the tensor is not C-contiguous: shape {shape}, strides {tensor.strides[:tensor.ndim]}")
    return GpuArray((tensor.data or 0) + tensor.byte_offset, shape, dtype, capsule)


def lend(array: GpuArray, device_type: int, number: int, take: Callable[[object], T]) -> T:
    """Return `take(capsule)` for a capsule of the array. Its owner is kept until the library gives the memory back.

    Any thread may give it back. It needs Python's lock for that.

    Args:
        array: C-contiguous memory.
        device_type: The type of its device: CPU or CUDA.
        number: The number of its device, as the library counts.
        take: Consumes the capsule at once, or raises.
    """
    shape = (c_int64 * len(array.shape))(*array.shape)
    tensor = DLTensor(data=array.address, device_type=device_type, device_id=number, ndim=len(array.shape),
                      code=code_of(array.dtype), bits=8 * array.dtype.itemsize, lanes=1, shape=shape)
    struct = DLManagedTensor(tensor=tensor, deleter=ctypes.cast(_give_back, c_void_p))
    address = ctypes.addressof(struct)
    _lent[address] = struct, shape, array.owner
    try:
        return take(_new_capsule(address, NAME, None))
    except BaseException:
        _lent.pop(address, None)
        raise


_lent: dict[int, tuple[DLManagedTensor, object, object]] = {}  # by the address of the struct


@ctypes.CFUNCTYPE(None, c_void_p)
def _give_back(address: int) -> None:
    """The deleter of a lent tensor."""
    _lent.pop(address, None)


@atexit.register
def _keep_all() -> None:
    """Let libraries that give memory back after Python's end call no code of Python's."""
    for struct, _, _ in list(_lent.values()):
        struct.deleter = None


def code_of(dtype: np.dtype) -> int:
    """DLPack's code of the kind of a numpy dtype."""
    return _BFLOAT if dtype.name == "bfloat16" else _CODES.get(dtype.kind, -1)


def _is_contiguous(shape: tuple[int, ...], strides: list[int]) -> bool:
    """Whether these are strides, in elements, of an array in C order. Strides of dimensions of size 1 may have any."""
    expected = [math.prod(shape[i + 1:]) for i in range(len(shape))]
    return 0 in shape or all(size == 1 or stride == right for size, stride, right
                             in zip(shape, strides, expected, strict=True))


def struct_of(capsule: object) -> DLManagedTensor:
    """The struct of a capsule, valid as long as the capsule. Raises ValueError as `array_of`."""
    return DLManagedTensor.from_address(_get_pointer(capsule, NAME))


# Prototypes of our own: attributes of ctypes.pythonapi's functions are shared with all who use it.
_get_pointer = ctypes.PYFUNCTYPE(c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer",
                                                                              ctypes.pythonapi))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, ctypes.c_char_p, c_void_p)(("PyCapsule_New",
                                                                                       ctypes.pythonapi))
