"""What the plane for NCCL enqueues: calls, counts, dtypes and streams, on a stand-in that writes them down."""

import threading

import ml_dtypes
import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.copy.plan import CopyJob
from mpistrat.gpu.nccl.data import NcclData
from mpistrat.gpu.nccl.types import (
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
    WireFormat,
    wire_format,
)
from tests.support import gpu_stand_in
from tests.support.dtypes import dtype_of
from tests.support.gpu_backends import allreduce
from tests.support.gpu_stand_in import Communicator, Device

SUM = OPERATIONS[ReduceOp.SUM]


class Job:
    """A plane over one rank."""

    def __init__(self, streams: int = 1, buffer_bytes: int = 2**16, size: int = 1, version: int = AVERAGES_FROM):
        self.device = Device()
        buffers = [[self.device.scratch(buffer_bytes) for _ in range(2)] for _ in range(streams)]
        # One rank makes all calls, even where the plane takes it for one of several.
        self.plane = NcclData(self.device, 0, size, [Communicator(self.device, 1) for _ in range(streams)], buffers,
                              buffer_bytes, version)
        self._arrays: list[GpuArray] = []

    def arrays(self, *values: np.ndarray) -> list[GpuArray]:
        """The values on the stand-in."""
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
        """Let the stand-in do what was enqueued."""
        events = self.plane.finish()
        while not all(event.done for event in events):
            pass

    @property
    def calls(self) -> list[str]:
        """The names of what was enqueued."""
        return [entry[0] for entry in self.device.log]


def test_a_single_tensor_is_reduced_from_its_memory_to_that_of_the_result() -> None:
    job = Job()
    result, = job.reduce(np.arange(5, dtype=np.float32))
    assert job.device.log == [("allReduce", 5, FLOAT32, SUM, 3)]
    assert result.tolist() == [0, 1, 2, 3, 4]


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


def test_bfloat16_has_nccls_own_number() -> None:
    job = Job()
    job.reduce(np.ones(3, ml_dtypes.bfloat16))
    assert [entry for entry in job.device.log if entry[0] == "allReduce"] == [("allReduce", 3, BFLOAT16, SUM, 3)]


def test_a_complex_tensor_is_summed_as_pairs() -> None:
    job = Job()
    result, = job.reduce(np.array([1 + 2j, 3j], np.complex64), scale=Scale(0.5))
    assert job.device.log[1][:3] == ("allReduce", 4, FLOAT32)
    assert result.tolist() == [0.5 + 1j, 1.5j]


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
    assert "do not fit into a fusion buffer of 64" in job.plane.why_not(two, ReduceOp.SUM)
    assert job.plane.why_not(job.arrays(np.ones(1000)), ReduceOp.SUM) == "", "a single tensor needs no buffer"


def test_a_prescaled_tensor_is_scaled_into_the_result_and_reduced_there() -> None:
    job = Job()
    result, = job.reduce(np.ones(3), prescale=0.25, scale=Scale(8.0))
    assert job.calls == ["batched_copy", "allReduce", "batched_copy"]
    assert result.tolist() == [2, 2, 2]


def test_integers_are_divided_exactly() -> None:
    job = Job()
    assert job.reduce(np.array([2**53 + 1, -7]), scale=Scale(1.0, 1))[0].tolist() == [2**53 + 1, -7]
    assert job.reduce(np.array([3 * 2**53 + 3, -7]), scale=Scale(1.0, 3))[0].tolist() == [2**53 + 1, -2]


def test_empty_tensors_enqueue_nothing() -> None:
    job = Job()
    job.reduce(np.ones(0))
    job.reduce(np.ones(0), np.ones((3, 0)))
    assert job.device.log == []


def test_rows_alike_are_gathered_by_one_call_and_others_by_a_group_of_broadcasts() -> None:
    job = Job()
    source, target = job.arrays(np.ones(3, np.int16), np.ones(9, np.int16))
    job.plane.allgather(source, target, [3, 3, 3])
    job.plane.allgather(source, target, [3, 0, 2])
    assert job.device.log == [("allGather", 6, UINT8, 3), ("group",), ("broadcast", 6, UINT8, 0, 3),
                              ("broadcast", 4, UINT8, 2, 3), ("end of group",)]


def test_a_list_is_broadcast_as_a_group() -> None:
    job = Job()
    sources = job.arrays(np.ones(3, np.float16), np.zeros(0, np.float16), np.ones(2, np.float16))
    job.plane.broadcast(sources, sources, 0)
    assert job.device.log == [("group",), ("broadcast", 6, UINT8, 0, 3), ("broadcast", 4, UINT8, 0, 3),
                              ("end of group",)]


def test_work_begins_after_the_events_it_was_told_to_wait_for() -> None:
    job = Job()
    target, = job.arrays(np.zeros(4))
    source = job.device.tensor(np.full(4, 5.0))  # Its contents are still to come, on a stream of the caller's.
    job.plane.wait_for([job.device.record()])
    allreduce(job.plane, [job.device.seen(source)], [target], Reduction(ReduceOp.SUM))
    events = job.plane.finish()
    while not all(event.done for event in events):
        pass
    assert target.owner.view().tolist() == [5.0] * 4


def test_abandoned_communicators_are_aborted_and_closed_ones_destroyed_once() -> None:
    given_up, done = Job(streams=2), Job(streams=2)
    for _ in range(2):
        given_up.plane.abandon()
        done.plane.close()
    assert (given_up.calls, done.calls) == (["abort"] * 2, ["destroy"] * 2)


@pytest.mark.parametrize("wire, number", [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_floats_travel_in_halves_that_the_kernel_makes_and_takes(wire: str, number: int) -> None:
    job = Job()
    sources = job.arrays(np.array([1 / 3, 2.0], np.float32), np.ones(3, np.float32))
    targets = job.arrays(np.zeros(2, np.float32), np.zeros(3, np.float32))
    allreduce(job.plane, sources, targets, Reduction(ReduceOp.SUM, 1.0, Scale(1.0, 2)), wire)
    job.finish()
    assert job.device.log == [("batched_copy", 2, CopyJob("float32", wire), 2), ("allReduce", 16, number, SUM, 3),
                              ("batched_copy", 2, CopyJob(wire, "float32", 1.0, 2), 2)]
    rounded = float(np.float32(1 / 3).astype(np.float16 if wire == "float16" else ml_dtypes.bfloat16))
    assert targets[0].owner.view().tolist() == pytest.approx([rounded / 2, 1.0], rel=1e-7)


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


def test_compressed_averages_are_divided_by_nccl_too() -> None:
    job = Job(size=4)
    source, target = job.arrays(np.ones(3, np.float32), np.zeros(3, np.float32))
    allreduce(job.plane, [source], [target], Reduction(ReduceOp.SUM, 1.0, Scale(1.0, 4)), "float16")
    assert job.device.log[1] == ("allReduce", 8, FLOAT16, AVERAGE, 3)


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


def test_a_part_of_an_average_is_nccls_own_too() -> None:
    job = Job(size=4)
    source, target = job.arrays(np.ones(3, np.float32), np.zeros(3, np.float32))
    job.plane.reducescatter(source, target, [3], Reduction(ReduceOp.SUM, 1.0, Scale(1.0, 4)))
    assert job.device.log == [("reduceScatter", 3, FLOAT32, AVERAGE, 3)]


def test_the_average_of_large_halves_does_not_overflow() -> None:
    rows = np.full((4, 2), 60000, np.float16)
    assert gpu_stand_in._combined(rows, AVERAGE).tolist() == [60000] * 2
    with np.errstate(over="ignore"):
        assert np.isinf(gpu_stand_in._combined(rows, SUM)).all()


def test_narrow_integers_are_widened() -> None:
    assert wire_format("int16", ReduceOp.SUM) == WireFormat("int16", "int32")
    assert wire_format("float32", ReduceOp.SUM) == WireFormat("float32", "float32")


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


def test_parts_of_different_sizes_are_reduced_to_each_rank_as_a_group() -> None:
    job = Job()
    source, target = job.arrays(np.ones(5, np.complex64), np.zeros(3, np.complex64))
    job.plane.reducescatter(source, target, [3, 0, 2], Reduction(ReduceOp.SUM))
    assert job.device.log == [("group",), ("reduce", 6, FLOAT32, SUM, 0, 3), ("reduce", 4, FLOAT32, SUM, 2, 3),
                              ("end of group",)]


def test_what_is_scattered_by_way_of_a_buffer_must_fit_into_it() -> None:
    job = Job(buffer_bytes=64)
    large, = job.arrays(np.ones(17, np.int16))
    assert "do not fit into a fusion buffer of 64" in job.plane.why_not_scatter(large, Reduction(ReduceOp.SUM, 1.0))
    floats, = job.arrays(np.ones(17, np.float32))
    assert job.plane.why_not_scatter(floats, Reduction(ReduceOp.SUM, 1.0)) == ""
    assert "do not fit into a fusion buffer of 64" in job.plane.why_not_scatter(floats, Reduction(ReduceOp.SUM, 0.5))
    assert job.plane.why_not_scatter(job.arrays(np.ones(1, complex))[0], Reduction(ReduceOp.PRODUCT)) == \
        "NCCL has no product of complex128"


def test_an_exchange_is_a_group_of_sends_and_receives_with_their_peers() -> None:
    job = Job()
    source, target = job.arrays(np.ones(5, np.int16), np.ones(4, np.int16))
    job.plane.alltoall(source, target, [2, 0, 3], [2, 1, 1], 3)
    assert job.device.log == [
        ("group",), ("send", 4, UINT8, 0, 3), ("recv", 4, UINT8, 0, 3), ("recv", 2, UINT8, 1, 3),
        ("send", 6, UINT8, 2, 3), ("recv", 2, UINT8, 2, 3), ("end of group",)]


def test_two_threads_that_abandon_abort_each_communicator_once_and_no_collective_begins_after_it() -> None:
    job = Job(streams=3)
    threads = [threading.Thread(target=job.plane.abandon) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert job.calls == ["abort"] * 3
    array = job.arrays(np.ones(3))
    with pytest.raises(EngineError, match="communicators were aborted"):
        allreduce(job.plane, array, array, Reduction(ReduceOp.SUM))


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
