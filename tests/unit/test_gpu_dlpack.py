"""Capsules of DLPack as TensorFlow makes them, read on the CPU: the same code and structs as for a GPU."""

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest

from mpistrat.gpu import dlpack
from tests.support.copy_model import memory_at

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
          "uint64", "bool", "complex64", "complex128"]


def read(tensor: "tf.Tensor") -> dlpack.GpuArray:
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    return dlpack.array_of(capsule, np.dtype(tensor.dtype.as_numpy_dtype), dlpack.CPU)


@pytest.mark.parametrize("shape", [(2, 3), (), (5,), (1, 4, 1), (0, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_read_where_it_is(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
    tensor = tf.constant(values.astype(tf.as_dtype(dtype).as_numpy_dtype))
    array = read(tensor)
    assert (array.shape, array.dtype.name) == (shape, dtype)
    np.testing.assert_array_equal(memory_at(array.address, array.size, array.dtype).reshape(shape), tensor.numpy())


def test_it_is_the_memory_of_the_tensor_and_no_copy() -> None:
    tensor = tf.constant(np.arange(1000.0))
    assert read(tensor).address == read(tensor).address


def test_the_array_keeps_the_memory_and_gives_it_back() -> None:
    array = read(tf.zeros([1000], tf.int64) + 7)
    gc.collect()
    other = tf.zeros([1000], tf.int64) + 8
    assert memory_at(array.address, 1000, array.dtype).tolist() == [7] * 1000
    del array, other
    before = resident_bytes()
    for _ in range(200):
        read(tf.zeros([250_000], tf.float32) + 1)
    assert resident_bytes() - before < 50 * 10**6  # All of them have 200 MB.


def resident_bytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_capsule_that_has_been_consumed_is_an_error() -> None:
    capsule = tf.experimental.dlpack.to_dlpack(tf.zeros([3]))
    tf.experimental.dlpack.from_dlpack(capsule)
    with pytest.raises(ValueError, match="PyCapsule_GetPointer"):
        dlpack.array_of(capsule, np.dtype("float32"), dlpack.CPU)


def test_reading_does_not_consume_it() -> None:
    capsule = tf.experimental.dlpack.to_dlpack(tf.constant([1.0, 2.0]))
    dlpack.array_of(capsule, np.dtype("float32"), dlpack.CPU)
    assert tf.experimental.dlpack.from_dlpack(capsule).numpy().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype, device_type, text", [
    ("float32", dlpack.CUDA, "device of DLPack's type 1, not 2"), ("float64", dlpack.CPU, "32 bits.* not float64"),
    ("int32", dlpack.CPU, "not int32"), ("datetime64[s]", dlpack.CPU, "not datetime64")])
def test_what_does_not_fit_is_an_error(dtype: str, device_type: int, text: str) -> None:
    capsule = tf.experimental.dlpack.to_dlpack(tf.zeros([3]))
    with pytest.raises(BufferError, match=text):
        dlpack.array_of(capsule, np.dtype(dtype), device_type)


def test_strides_and_the_offset_of_other_libraries_are_seen() -> None:
    whole = np.arange(12.0).reshape(3, 4)
    with pytest.raises(BufferError, match=r"not C-contiguous: shape \(3, 2\), strides \[4, 1\]"):
        dlpack.array_of(whole[:, :2].__dlpack__(), whole.dtype, dlpack.CPU)
    row = dlpack.array_of(whole[2:, ::1].__dlpack__(), whole.dtype, dlpack.CPU)
    assert row.address == whole.ctypes.data + 64
    shifted = whole.__dlpack__()
    dlpack.struct_of(shifted).tensor.byte_offset, dlpack.struct_of(shifted).tensor.shape[0] = 32, 2
    assert dlpack.array_of(shifted, whole.dtype, dlpack.CPU).address == whole.ctypes.data + 32


def test_the_number_of_its_device_is_tensorflows_own() -> None:
    # So it cannot be CUDA's: the second logical device of the only CPU has number 1. GPUs have the same code in
    # TensorFlow's dlpack.cc, which takes the number from the device's name.
    script = ("import tensorflow as tf; from mpistrat.gpu import dlpack; cpu, = tf.config.list_physical_devices('CPU');"
              "tf.config.set_logical_device_configuration(cpu, 2 * [tf.config.LogicalDeviceConfiguration()])\n"
              "with tf.device('CPU:1'): capsule = tf.experimental.dlpack.to_dlpack(tf.zeros([3]) + 1)\n"
              "print(dlpack.struct_of(capsule).tensor.device_id)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


class Owner:
    """What is kept as long as the memory is lent."""


def lent(values: np.ndarray) -> "tuple[weakref.ref[Owner], tf.Tensor]":
    """A tensor of TensorFlow in the memory of an array."""
    owner = Owner()
    array = dlpack.GpuArray(values.ctypes.data, values.shape, values.dtype, owner)
    return weakref.ref(owner), dlpack.lend(array, dlpack.CPU, 0, tf.experimental.dlpack.from_dlpack)


def aligned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Zeros in memory that TensorFlow accepts."""
    numpy_dtype = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
    memory = np.zeros(int(np.prod(shape)) * numpy_dtype.itemsize + 128, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start:memory.size - 128 + start].view(numpy_dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(2, 3), (), (5,), (0, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_lent_until_the_last_tensor_over_it_is_gone(dtype: str, shape: tuple[int, ...]) -> None:
    values = aligned(shape, dtype)
    owner, tensor = lent(values)
    assert (tensor.dtype.name, tensor.shape) == (dtype, shape)
    values[...] = 1
    view = tf.reshape(tensor, [-1])
    del tensor
    assert owner() is not None and (view.numpy() == 1).all()
    del view
    assert owner() is None


def test_memory_that_is_not_taken_is_not_lent() -> None:
    owner, values = Owner(), aligned((3,), "float32")
    known, array = weakref.ref(owner), dlpack.GpuArray(values.ctypes.data, (3,), values.dtype, owner)
    del owner
    with pytest.raises(ZeroDivisionError):
        dlpack.lend(array, dlpack.CPU, 0, lambda capsule: 1 // 0)
    # The number of a GPU is that of TensorFlow's logical device.
    with pytest.raises(tf.errors.InvalidArgumentError, match="GPU:99 unknown device"):
        dlpack.lend(array, dlpack.CUDA, 99, tf.experimental.dlpack.from_dlpack)
    del array
    assert known() is None


def test_tensors_that_outlive_python_call_none_of_it() -> None:
    script = ("import numpy as np, tensorflow as tf; from mpistrat.gpu import dlpack\n"
              "values = np.zeros(64)\n"
              "array = dlpack.GpuArray(-(-values.ctypes.data // 64) * 64, (50,), values.dtype, values)\n"
              "tensor = dlpack.lend(array, dlpack.CPU, 0, tf.experimental.dlpack.from_dlpack)\n"
              "dlpack._keep_all(); del tensor; print(len(dlpack._lent))")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
