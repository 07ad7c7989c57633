"""Checks NCCL on one rank, without MPI: every dtype and operation, groups, compression, an abort and a new start.

    python -m tests.gpu.one_rank
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.backend import await_on_host
from mpistrat.gpu.nccl_data import AVERAGE, AVERAGES_FROM, NcclData
from mpistrat.gpu.nccl_data import DTYPES as NUMBERS
from tests.gpu.memory import DTYPES, LIMIT_S, can_test, download, open_device, scratch, upload
from tests.support.dtypes import dtype_of
from tests.support.gpu_backends import allreduce

if TYPE_CHECKING:
    from mpistrat.gpu.device import Device

BUFFER_BYTES = 2**20
OPERATIONS = (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)


def connected(device: "Device") -> NcclData:
    """Return an NCCL backend with two communicators, in which this rank is the only one."""
    communicators = [device.communicator(1, device.unique_id(), 0) for _ in range(2)]
    buffers = [[scratch(device, BUFFER_BYTES) for _ in range(2)] for _ in communicators]
    return NcclData(device, 0, 1, communicators, buffers, BUFFER_BYTES, device.nccl_version())


def finish(plane: NcclData) -> None:
    for event in plane.finish():
        await_on_host(event, LIMIT_S)
    plane.check()


def numbers(dtype: np.dtype, count: int) -> np.ndarray:
    """Return small even numbers, which are exact in every dtype. For booleans return zeros and ones."""
    return (np.arange(count) % (2 if dtype.kind == "b" else 20) * (1 if dtype.kind == "b" else 2)).astype(dtype)


def same(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(result.astype(np.complex128), expected.astype(np.complex128))


def reduced(device: "Device", plane: NcclData, values: list[np.ndarray], reduction: Reduction, wire: str = "") -> str:
    """All-reduce, and compare the results with the right ones. Return why NCCL cannot reduce; "" if it can."""
    sources = [upload(device, value) for value in values]
    targets = [upload(device, np.zeros_like(value)) for value in values]
    reason = plane.why_not(sources, reduction.op, wire)
    if reason:
        return reason
    allreduce(plane, sources, targets, reduction, wire)
    finish(plane)
    for value, target in zip(values, targets, strict=True):
        same(download(device, target), (value * reduction.prescale * reduction.scale.factor).astype(value.dtype))
    return ""


def check_reductions(device: "Device", plane: NcclData) -> None:
    """Check every dtype and operation with one tensor and with a group, with and without scales."""
    for name in filter(can_test, DTYPES):
        dtype = dtype_of(name)
        one, group = [numbers(dtype, 5000)], [numbers(dtype, count) for count in (1, 500, 3, 0, 70)]
        for op in OPERATIONS:
            scales = [(1.0, IDENTITY)] if name == "bool" else [(1.0, IDENTITY), (0.5, Scale(2.0))]
            for prescale, scale in scales:
                for values in (one, group):
                    reason = reduced(device, plane, values, Reduction(op, prescale, scale))
                    assert not reason or name.startswith("complex") or name == "bool", reason


def check_compression(device: "Device", plane: NcclData) -> None:
    """Check floats that are sent in half precision: fused tensors, and a large tensor that is cut into pieces."""
    for name in ("float32", "float64"):
        for wire in filter(can_test, ("float16", "bfloat16")):
            large = [numbers(np.dtype(name), BUFFER_BYTES)]
            for values in (large, [numbers(np.dtype(name), count) for count in (9, 1000)]):
                assert not reduced(device, plane, values, Reduction(ReduceOp.SUM), wire)


def check_others(device: "Device", plane: NcclData) -> None:
    values = numbers(np.dtype("float32"), 1000)
    source = upload(device, values)

    def moved(enqueue: Callable[[GpuArray], None]) -> None:
        target = upload(device, np.zeros_like(values))
        enqueue(target)
        finish(plane)
        same(download(device, target), values)

    moved(lambda target: plane.allgather(source, target, [1000]))
    moved(lambda target: plane.broadcast([source], [target], 0))
    moved(lambda target: plane.reducescatter(source, target, [1000], Reduction(ReduceOp.SUM, 0.5, Scale(2.0))))
    moved(lambda target: plane.alltoall(source, target, [1000], [1000], 1000))
    finish(plane)


def check_average(device: "Device") -> None:
    """Check ncclAvg with every floating-point dtype. Calls NCCL directly: NcclData does not use ncclAvg on one rank."""
    if device.nccl_version() < AVERAGES_FROM:
        print("not tested: ncclAvg, which this NCCL does not have")
        return
    communicator, stream = device.communicator(1, device.unique_id(), 0), device.stream()
    for name in filter(can_test, ("float16", "bfloat16", "float32", "float64")):
        values = numbers(dtype_of(name), 1000)
        source, target = upload(device, values), upload(device, np.zeros_like(values))
        communicator.allReduce(source.address, target.address, values.size, NUMBERS[name], AVERAGE, stream.ptr)
        await_on_host(device.record(stream), LIMIT_S)
        same(download(device, target), values)
    communicator.destroy()


def check_abort(device: "Device", plane: NcclData) -> NcclData:
    """Abort while work is enqueued. Check that no later collective begins, and return a new backend that works."""
    source = upload(device, numbers(np.dtype("float32"), 10**6))
    allreduce(plane, [source], [source], Reduction(ReduceOp.SUM))
    plane.abandon()
    plane.abandon()
    try:
        allreduce(plane, [source], [source], Reduction(ReduceOp.SUM))
    except EngineError:
        pass
    else:
        raise AssertionError("a collective began after the abort")
    new = connected(device)
    assert not reduced(device, new, [numbers(np.dtype("float32"), 100)], Reduction(ReduceOp.MAX))
    return new


def main() -> None:
    device = open_device()
    with device.current():
        plane = connected(device)
        check_reductions(device, plane)
        check_compression(device, plane)
        check_others(device, plane)
        check_average(device)
        check_abort(device, plane).close()
    print(f"NCCL {device.nccl_version()}: one rank reduces, compresses, moves, averages, aborts and starts again")


if __name__ == "__main__":
    main()
