"""What the plane for NCCL enqueues: calls, counts, dtypes and streams, on a stand-in that writes them down."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.copy_kernel import CopyJob
from mpistrat.gpu.nccl_data import (
    AVERAGE,
    AVERAGES_FROM,
    BFLOAT16,
    DTYPES,
    FLOAT16,
    FLOAT32,
    INT8,
    INT32,
    OPERATIONS,
    UINT8,
    NcclData,
    wire_format,
)
from tests.support.dtypes import dtype_of
from tests.support.gpu_backends import allreduce
from tests.support.gpu_stand_in import Communicator, Device

SUM = OPERATIONS[ReduceOp.SUM]


class Job:
    def __init__(self, streams: int = 1, buffer_bytes: int = 2**16, size: int = 1, version: int = AVERAGES_FROM):
        self.device = Device()
        buffers = [[self.device.scratch(buffer_bytes) for _ in range(2)] for _ in range(streams)]
        # One rank makes all calls, even where the plane takes it for one of several.
        self.plane = NcclData(self.device, 0, size, [Communicator(self.device, 1) for _ in range(streams)], buffers,
                              buffer_bytes, version)
        self._arrays: list[GpuArray] = []

    def arrays(self, *values: np.ndarray) -> list[GpuArray]:
        self._arrays += [self.device.seen(self.device.tensor(value)) for value in values]
        self.device.run_all()
        return self._arrays[-len(values):]

    def reduce(self, *values: np.ndarray, op: ReduceOp = ReduceOp.SUM, prescale: float = 1.0,
               scale: Scale = IDENTITY) -> list[np.ndarray]:
        """What the values become when the only rank reduces them."""
        sources = self.arrays(*values)
        targets = self.arrays(*map(np.zeros_like, values))
        assert self.plane.why_not(sources, op) == ""
        allreduce(self.plane, sources, targets, Reduction(op, prescale, scale))
        self.finish()
        return [target.owner.view().copy() for target in targets]

    def finish(self) -> None:
        events = self.plane.finish()
        while not all(event.done for event in events):
            pass

    @property
    def calls(self) -> list[str]:
        return [entry[0] for entry in self.device.log]


def test_a_bucket_is_one_launch_one_reduction_and_one_launch() -> None:
    job = Job()
    results = job.reduce(np.arange(5, dtype=np.float32), np.ones((2, 3), np.float32), scale=Scale(1.0, 2))
    plain, halved = CopyJob("float32", "float32"), CopyJob("float32", "float32", 1.0, 2)
    # The first tensor takes 8 elements, so that the second begins aligned; and so does the whole buffer.
    assert job.device.log == [("batched_copy", 2, plain, 2), ("allReduce", 16, FLOAT32, SUM, 3),
                              ("batched_copy", 2, halved, 2)]
    assert [result.tolist() for result in results] == [[0, 0.5, 1, 1.5, 2], [[0.5] * 3] * 2]


def test_a_bucket_is_packed_before_the_one_before_is_unpacked() -> None:
    job = Job()
    pairs = [job.arrays(np.ones(4), np.ones(4)) for _ in range(3)]
    for pair in pairs:
        allreduce(job.plane, pair, pair, Reduction(ReduceOp.SUM))
    job.plane.finish()
    assert job.calls == ["batched_copy", "allReduce", "batched_copy", "allReduce", "batched_copy", "batched_copy",
                         "allReduce", "batched_copy", "batched_copy"]


def test_lanes_take_turns() -> None:
    job = Job(streams=3)
    array = job.arrays(np.ones(4, np.float32))
    for _ in range(6):
        allreduce(job.plane, array, array, Reduction(ReduceOp.SUM))
    streams = [entry[4] for entry in job.device.log]
    assert len(set(streams)) == 3 and streams[:3] == streams[3:]


@pytest.mark.parametrize("name", [*DTYPES, "int16", "uint16"])
def test_every_dtype_travels_as_nccls_own_or_a_wider_one(name: str) -> None:
    job = Job()
    dtype = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    values = np.arange(6).astype(dtype)
    for result in job.reduce(values, values[:2], scale=Scale(1.0, 2)):
        assert result.dtype == dtype
        expected = [0, 0, 1, 1, 2, 2] if dtype.kind in "iu" else [0, 0.5, 1, 1.5, 2, 2.5]
        assert result.astype(np.float64).tolist() == expected[:len(result)]
    wire = {"int16": "int32", "uint16": "uint32"}.get(name, name)
    assert job.device.log[1][2] == DTYPES[wire]


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_booleans_are_bytes(op: ReduceOp) -> None:
    job = Job()
    result, = job.reduce(np.array([True, False]), op=op)
    assert job.device.log == [("allReduce", 2, UINT8, OPERATIONS[op], 3)]
    assert result.tolist() == [True, False]


@pytest.mark.parametrize("dtype, op", [("complex64", ReduceOp.PRODUCT), ("longdouble", ReduceOp.SUM)])
def test_what_nccl_lacks_is_named(dtype: str, op: ReduceOp) -> None:
    assert wire_format(np.dtype(dtype).name, op) is None
    job = Job()
    assert job.plane.why_not(job.arrays(np.ones(2, dtype)), op).startswith(f"NCCL has no {op.name.lower()} of ")


def test_what_does_not_fit_into_a_buffer_is_refused() -> None:
    job = Job(buffer_bytes=64)
    two = job.arrays(np.ones(4), np.ones(5))
    assert "exceed the 64 bytes of a fusion buffer" in job.plane.why_not(two, ReduceOp.SUM)
    assert job.plane.why_not(job.arrays(np.ones(1000)), ReduceOp.SUM) == "", "a single tensor needs no buffer"


def test_empty_tensors_enqueue_nothing() -> None:
    job = Job()
    job.reduce(np.ones(0))
    job.reduce(np.ones(0), np.ones((3, 0)))
    assert job.device.log == []
    # Nor do they take the buffer of a reduction that is not unpacked yet.
    first, nothing, second = ([job.arrays(np.full(size, value, np.float32))[0] for _ in range(2)]
                              for size, value in ((3, 1), (0, 0), (3, 2)))
    job.device.log.clear()
    allreduce(job.plane, first, first, Reduction(ReduceOp.SUM))
    job.plane.reducescatter(nothing[0], nothing[1], [0], Reduction(ReduceOp.SUM, 2.0))
    allreduce(job.plane, second, second, Reduction(ReduceOp.SUM))
    job.finish()
    assert [array.owner.view()[0] for array in (*first, *second)] == [1, 1, 2, 2]


GROUP, END = ("group",), ("end of group",)
SUMMED, AVERAGED = Reduction(ReduceOp.SUM), Reduction(ReduceOp.SUM, 1.0, Scale(1.0, 4))


@pytest.mark.parametrize("dtype, method, arguments, log", [
    ("int16", "allgather", [[3, 3, 3]], [("allGather", 6, UINT8, 3)]),
    ("int16", "allgather", [[3, 0, 2]], [GROUP, ("broadcast", 6, UINT8, 0, 3), ("broadcast", 4, UINT8, 2, 3), END]),
    ("float32", "reducescatter", [[3], AVERAGED], [("reduceScatter", 3, FLOAT32, AVERAGE, 3)]),
    ("complex64", "reducescatter", [[3, 0, 2], SUMMED], [
        GROUP, ("reduce", 6, FLOAT32, SUM, 0, 3), ("reduce", 4, FLOAT32, SUM, 2, 3), END]),
    ("int16", "alltoall", [[2, 0, 3], [2, 1, 1], 3], [
        GROUP, ("send", 4, UINT8, 0, 3), ("recv", 4, UINT8, 0, 3), ("recv", 2, UINT8, 1, 3),
        ("send", 6, UINT8, 2, 3), ("recv", 2, UINT8, 2, 3), END]),
], ids=["rows alike", "rows", "a part of an average", "parts of different sizes", "an exchange"])
def test_parts_alike_are_one_call_and_others_a_group(dtype: str, method: str, arguments: list[Any],
                                                     log: list[Any]) -> None:
    job = Job(size=4)
    source, target = job.arrays(np.ones(9, dtype), np.ones(9, dtype))
    getattr(job.plane, method)(source, target, *arguments)
    assert job.device.log == log


def test_a_list_is_broadcast_as_a_group() -> None:
    job = Job()
    sources = job.arrays(np.ones(3, np.float16), np.zeros(0, np.float16), np.ones(2, np.float16))
    job.plane.broadcast(sources, sources, 0)
    assert job.device.log == [GROUP, ("broadcast", 6, UINT8, 0, 3), ("broadcast", 4, UINT8, 0, 3), END]


def test_compressed_averages_are_divided_by_nccl_too() -> None:
    job = Job(size=4)
    source, target = job.arrays(np.ones(3, np.float32), np.zeros(3, np.float32))
    allreduce(job.plane, [source], [target], AVERAGED, "float16")
    assert job.device.log[1] == ("allReduce", 8, FLOAT16, AVERAGE, 3)


def test_abandoned_communicators_are_aborted_and_closed_ones_destroyed_once() -> None:
    given_up, done = Job(streams=2), Job(streams=2)
    for _ in range(2):
        given_up.plane.abandon()
        done.plane.close()
    assert (given_up.calls, done.calls) == (["abort"] * 2, ["destroy"] * 2)
    array = given_up.arrays(np.ones(3))
    with pytest.raises(EngineError, match="communicators were aborted"):
        allreduce(given_up.plane, array, array, Reduction(ReduceOp.SUM))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "complex64"])
def test_what_is_no_wider_float_travels_as_it_is(dtype: str) -> None:
    assert wire_format(dtype, ReduceOp.SUM, "float16") == wire_format(dtype, ReduceOp.SUM)


@pytest.mark.parametrize("dtype, wire, calls", [("int16", "", 4), ("float32", "float16", 2)])
def test_a_converted_tensor_larger_than_a_buffer_is_cut_into_pieces(dtype: str, wire: str, calls: int) -> None:
    job = Job(buffer_bytes=1024)
    values = np.arange(1000).astype(dtype)
    source, target = job.arrays(values, np.zeros_like(values))
    assert job.plane.why_not([source], ReduceOp.SUM, wire) == ""
    allreduce(job.plane, [source], [target], Reduction(ReduceOp.SUM), wire)
    job.finish()
    assert job.calls.count("allReduce") == calls
    np.testing.assert_array_equal(target.owner.view(), values)


def test_the_numbers_are_those_of_cupys_nccl() -> None:
    nccl = pytest.importorskip("cupy.cuda.nccl", reason="cupy is not installed")
    assert (INT8, UINT8, INT32, FLOAT16, BFLOAT16) == (nccl.NCCL_INT8, nccl.NCCL_UINT8, nccl.NCCL_INT32,
                                                       nccl.NCCL_FLOAT16, nccl.NCCL_BFLOAT16)
    assert {name: getattr(nccl, f"NCCL_{name.upper()}") for name in DTYPES} == DTYPES
    assert AVERAGE == nccl.NCCL_AVG
    assert OPERATIONS == {ReduceOp.SUM: nccl.NCCL_SUM, ReduceOp.PRODUCT: nccl.NCCL_PROD, ReduceOp.MAX: nccl.NCCL_MAX,
                          ReduceOp.MIN: nccl.NCCL_MIN}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_an_average_of_floats_is_nccls_own_and_needs_no_scaling(dtype: str) -> None:
    job = Job(size=4)
    values = np.ones(3, dtype_of(dtype))
    job.reduce(values, scale=Scale(1.0, 4))
    job.reduce(values, values, scale=Scale(1.0, 4))
    assert [entry[3] for entry in job.device.log if entry[0] == "allReduce"] == [AVERAGE, AVERAGE]
    assert {entry[2].is_plain for entry in job.device.log if entry[0] == "batched_copy"} == {True}


@pytest.mark.parametrize("dtype, prescale, scale, version", [
    ("float32", 1.0, Scale(1.0, 3), AVERAGES_FROM),  # while a rank waits in join()
    ("float32", 1.0, Scale(2.0, 4), AVERAGES_FROM),
    ("float32", 0.5, Scale(1.0, 4), AVERAGES_FROM),
    ("float32", 1.0, Scale(1.0, 4), AVERAGES_FROM - 1),
    ("int32", 1.0, Scale(1.0, 4), AVERAGES_FROM),
])
def test_other_averages_are_scaled_sums(dtype: str, prescale: float, scale: Scale, version: int) -> None:
    job = Job(size=4, version=version)
    result, = job.reduce(np.full(3, 24).astype(dtype), prescale=prescale, scale=scale)
    assert [entry[3] for entry in job.device.log if entry[0] == "allReduce"] == [SUM]
    assert result.tolist() == [24 * prescale * scale.factor / scale.divisor] * 3


@pytest.mark.parametrize("prescale, scale", [(1.0, IDENTITY), (0.5, Scale(4.0))])
@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_a_part_of_a_reduction_is_kept(dtype: str, prescale: float, scale: Scale) -> None:
    job = Job()
    source, target = job.arrays(np.array([2, 4, 6], dtype), np.zeros(3, dtype))
    assert job.plane.why_not_scatter(source, Reduction(ReduceOp.SUM, prescale)) == ""
    job.plane.reducescatter(source, target, [3], Reduction(ReduceOp.SUM, prescale, scale))
    job.finish()
    assert target.owner.view().tolist() == [v * prescale * scale.factor for v in (2, 4, 6)]
    number = FLOAT32 if dtype == "float32" else INT32
    is_direct = dtype == "float32" and prescale == 1.0
    assert [entry for entry in job.device.log if entry[0] != "batched_copy"] == [("reduceScatter", 3, number, SUM, 3)]
    assert job.calls.count("batched_copy") == (0 if is_direct else 2)


def test_what_is_scattered_by_way_of_a_buffer_must_fit_into_it() -> None:
    job = Job(buffer_bytes=64)
    large, = job.arrays(np.ones(17, np.int16))
    assert "exceed the 64 bytes of a fusion buffer" in job.plane.why_not_scatter(large, Reduction(ReduceOp.SUM, 1.0))
    floats, = job.arrays(np.ones(17, np.float32))
    assert job.plane.why_not_scatter(floats, Reduction(ReduceOp.SUM, 1.0)) == ""
    assert "exceed the 64 bytes of a fusion buffer" in job.plane.why_not_scatter(floats, Reduction(ReduceOp.SUM, 0.5))
    assert job.plane.why_not_scatter(job.arrays(np.ones(1, complex))[0], Reduction(ReduceOp.PRODUCT)) == \
        "NCCL has no product of complex128"


def test_an_abort_that_fails_keeps_no_other_communicator_from_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    job, aborted = Job(streams=3), []

    def abort(self: Communicator) -> None:
        aborted.append(self)
        if len(aborted) == 1:
            raise RuntimeError("unhandled cuda error")

    monkeypatch.setattr(Communicator, "abort", abort)
    with pytest.raises(RuntimeError, match="unhandled cuda error"):
        job.plane.abandon()
    assert len(set(aborted)) == 3
