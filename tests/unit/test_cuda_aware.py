"""GPU tensors reduced by MPI on their memory, on a stand-in: what MPI is given, and when; and who is asked for it."""

import ctypes
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpistrat import mpi_setup
from mpistrat.collectives import device_mpi
from mpistrat.collectives.cuda_aware import CudaAwareData
from mpistrat.collectives.local import ThreadGroup
from mpistrat.collectives.staged import StagedData
from mpistrat.errors import EngineError
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.connection import Ways, connect
from mpistrat.gpu.plane import GpuPlane
from mpistrat.messages import ReduceOp
from mpistrat.scale import Scale
from mpistrat.settings import Settings
from tests import copy_model
from tests.gpu_stand_in import Device


class Twins:
    """Exchanges between two ranks that have the same memory contents; this one is the first. Writes down each call."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def exchange(self, source: int, target: int, sent: Sequence[int], received: Sequence[int]) -> None:
        self.calls.append(("exchange", list(sent), list(received)))
        own = copy_model.memory_at(source, sent[0], np.dtype(np.uint8))
        copy_model.memory_at(target, sum(received), np.dtype(np.uint8))[:] = np.tile(own, 2)

    def gather(self, target: int, counts: Sequence[int]) -> None:
        self.calls.append(("gather", list(counts)))
        memory = copy_model.memory_at(target, sum(counts), np.dtype(np.uint8))
        if counts[0] == counts[1]:
            memory[counts[0]:] = memory[:counts[0]]

    def broadcast(self, address: int, nbytes: int, root_rank: int) -> None:
        self.calls.append(("broadcast", nbytes, root_rank))


class Job:
    """A plane of the first of two ranks."""

    def __init__(self, buffer_bytes: int = 2**12):
        self.device, self.mpi = Device(), Twins()
        self.plane = CudaAwareData(self.device, self.mpi, [self.device.scratch(buffer_bytes) for _ in range(3)],
                                   buffer_bytes, 10.0,
                                   StagedData(self.device, 0, ThreadGroup(1).data(0), 10.0))

    def arrays(self, *values: np.ndarray) -> list[GpuArray]:
        """The values, which come late; the plane waits for them."""
        arrays = [self.device.seen(self.device.tensor(value)) for value in values]
        self.plane.wait_for([self.device.record()])
        return arrays

    def done(self) -> None:
        """Let the GPU do what it was given."""
        completion = self.plane.finish()
        while not completion.done:
            pass


def test_the_ranks_exchange_slices_and_gather_what_they_have_combined() -> None:
    job = Job()
    pattern = np.tile(np.arange(4.0), 2)  # Both halves are the same, as both ranks are.
    source, target = job.arrays(pattern, np.zeros(8))
    job.plane.allreduce([source], [target], ReduceOp.SUM, 3.0, Scale(1.0, 2))
    job.done()
    assert job.mpi.calls == [("exchange", [32, 32], [32, 32]), ("gather", [32, 32])]
    assert [entry[0] for entry in job.device.log] == ["batched_copy", "combine", "batched_copy"]
    np.testing.assert_array_equal(target.owner.view(), pattern * 3)


def test_a_bucket_is_packed_before_mpi_works_at_the_one_before() -> None:
    job = Job()
    arrays = job.arrays(*[np.ones(4)] * 4)
    job.plane.allreduce(arrays[:1], arrays[1:2], ReduceOp.SUM, 1.0, Scale())
    assert job.mpi.calls == []
    job.plane.allreduce(arrays[2:3], arrays[3:], ReduceOp.SUM, 1.0, Scale())
    assert [call[0] for call in job.mpi.calls] == ["exchange", "gather"]
    assert [entry[0] for entry in job.device.log] == ["batched_copy", "batched_copy", "combine", "batched_copy"]
    job.done()
    assert len(job.mpi.calls) == 4


@pytest.mark.parametrize("dtype, combined", [
    ("float16", "float32"), ("bfloat16", "float32"), ("int16", "int16"), ("bool", "uint8"), ("complex64", "float32"),
    ("float64", "float64")])
def test_halves_are_combined_in_float32_and_others_as_they_are(dtype: str, combined: str) -> None:
    job = Job()
    source, target = job.arrays(*[np.zeros(4, copy_model.dtype_of(dtype) if dtype == "bfloat16" else dtype)] * 2)
    op = ReduceOp.MAX if dtype == "bool" else ReduceOp.SUM
    assert job.plane.why_not([source], op, "float16") == ""
    job.plane.allreduce([source], [target], op, 1.0, Scale(), "float16")
    job.done()
    assert [entry[3] for entry in job.device.log if entry[0] == "combine"] == [combined]


def test_a_bucket_that_is_larger_on_its_way_goes_in_several_loads() -> None:
    job = Job(buffer_bytes=272)  # Of which two ranks use 256.
    values = [np.arange(count, dtype=np.float16) for count in (30, 1, 0, 100, 20)]
    sources, targets = job.arrays(*values), job.arrays(*map(np.zeros_like, values))
    assert job.plane.why_not(sources, ReduceOp.SUM) == ""
    job.plane.allreduce(sources, targets, ReduceOp.SUM, 1.0, Scale())
    job.done()
    assert [sum(call[1]) for call in job.mpi.calls if call[0] == "exchange"] == [160, 256, 256]
    assert {entry[1] for entry in job.device.log if entry[0] == "batched_copy"} == {1, 2}


def test_what_has_no_elements_is_not_sent() -> None:
    job = Job()
    source, target = job.arrays(np.zeros(0), np.zeros(0))
    job.plane.allreduce([source], [target], ReduceOp.SUM, 1.0, Scale())
    job.done()
    assert job.mpi.calls == []


def test_the_own_part_is_in_its_place_when_the_ranks_gather() -> None:
    job = Job()
    source, target = job.arrays(np.arange(3, dtype=np.int16), np.zeros(6, np.int16))
    job.plane.allgather(source, target, [3, 3])
    job.done()
    assert job.mpi.calls == [("gather", [6, 6])]
    assert target.owner.view().tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("root", [0, 1])
def test_the_root_sends_its_values_and_keeps_them(root: int) -> None:
    job = Job()
    arrays = job.arrays(np.ones(3, np.int8), np.ones(2), np.zeros(3, np.int8), np.zeros(2))
    job.plane.broadcast(arrays[:2], arrays[2:], root)
    job.done()
    assert job.mpi.calls == [("broadcast", 3, root), ("broadcast", 16, root)]
    assert arrays[3].owner.view().tolist() == [1 - root] * 2


def test_what_it_cannot_do_is_named() -> None:
    job = Job()
    assert job.plane.why_not(job.arrays(np.ones(2, complex)), ReduceOp.PRODUCT) == (
        "there is no product of complex128 on the GPU")


def test_a_gpu_that_does_not_get_done_is_an_error() -> None:
    job = Job()
    job.plane._pipeline._limit_s = 0.05
    never = job.device.record(job.device.stream())
    job.device._streams[-1].work.clear()
    source, target = job.arrays(np.ones(2), np.ones(2))
    job.plane.wait_for([never])
    job.plane.allreduce([source], [target], ReduceOp.SUM, 1.0, Scale())
    with pytest.raises(EngineError, match=r"not complete after 0\.05 s"):
        job.plane.finish()


def test_more_bytes_than_mpi_counts_are_broadcast_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_mpi, "LARGE_BYTES", 100)
    sent = []

    def broadcast(buffer: list, root: int) -> MPI.Request:
        sent.append((buffer[0].address, buffer[0].nbytes, root))
        return MPI.Request()  # one that is complete

    comm = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 2, Ibcast=broadcast)
    memory = np.zeros(250, np.uint8)
    start = memory.ctypes.data
    device_mpi.DeviceMpi(comm).gather(start, [90, 160])
    assert sent == [(start, 90, 0), (start + 90, 100, 1), (start + 190, 60, 1)]


# -- which way --------------------------------------------------------------------------------------------------------


def connected(wanted: str, ways: Ways, device: Device | None = None) -> GpuPlane | None:
    """What a lone rank connects to, as if it shared its GPU with another one."""
    device = device or Device()
    staged = StagedData(device, 0, ThreadGroup(1).data(0), 10.0)
    settings = Settings(gpu_operations=wanted, fusion_bytes=2**16)
    return connect(device, 0, 1, lambda value: [value] if not isinstance(value, tuple) else [value, value], settings,
                   10.0, staged, ways)[0]


def test_mpi_serves_where_nccl_cannot_and_the_library_takes_gpu_memory(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mpistrat"):
        plane = connected("auto", Ways(mpi=Twins(), says_mpi="MPIX_Query_cuda_support"))
    assert plane is not None and plane.name == "mpi"
    assert [(record.levelname, record.message) for record in caplog.records] == [(
        "INFO", "GPU tensors are reduced on the GPU, over an MPI library that takes its memory "
                "(MPIX_Query_cuda_support): ranks [0, 1] share a GPU, which NCCL allows from 2.30 on, with "
                "NCCL_MULTI_RANK_GPU_ENABLE=1")]


def test_tensors_are_staged_where_the_library_does_not_say_so() -> None:
    assert connected("auto", Ways(why_not_mpi="it says nothing")) is None


def test_mpi_that_is_wanted_and_cannot_serve_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"^MPISTRAT_GPU_OPERATIONS=mpi: it says nothing$"):
        connected("mpi", Ways(why_not_mpi="it says nothing"))
    with pytest.raises(EngineError, match=r"ranks \[0\] have no memory left for the buffers of MPI"):
        connected("mpi", Ways(mpi=Twins()), Device(free_bytes=1000))


def test_without_memory_for_its_buffers_tensors_are_staged_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    # There is room for the two buffers of NCCL, and not for three.
    assert connected("auto", Ways(mpi=Twins()), Device(free_bytes=2 * 2**17)) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.messages[0].endswith("; the GPUs of ranks [0] have no memory left for the buffers of MPI")


# -- what the library says --------------------------------------------------------------------------------------------


def library(text: str) -> Any:
    """As mpi4py.MPI is with some library."""
    return SimpleNamespace(__file__="MPI.so", Get_library_version=lambda: text)


@pytest.mark.parametrize("answer, says", [(1, "MPIX_Query_cuda_support"), (0, "")])
def test_the_library_is_asked(answer: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path: asked.append(path) or SimpleNamespace(
        MPIX_Query_cuda_support=lambda: answer))
    assert mpi_setup.takes_gpu_memory(library("Open MPI v5.0"), {}) == says
    assert asked == ["MPI.so"]


def test_a_library_that_cannot_be_asked_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mpi_setup.takes_gpu_memory(library("No such file"), {}) == ""
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
    assert mpi_setup.takes_gpu_memory(library("Intel(R) MPI Library"), {"MPICH_GPU_SUPPORT_ENABLED": "1"}) == ""


def test_a_library_without_a_barrier_in_finalize_is_left_as_it_is() -> None:
    assert not mpi_setup.finalize_without_barrier(library("No such file"))
    assert not mpi_setup.finalize_without_barrier(np.linalg._umath_linalg)


def test_cray_mpich_has_a_variable_for_it() -> None:
    cray = library("MPI VERSION    : CRAY MPICH version 8.1.29.19 (ANL base 3.4a2)")
    assert mpi_setup.takes_gpu_memory(cray, {"MPICH_GPU_SUPPORT_ENABLED": "1"}) == "MPICH_GPU_SUPPORT_ENABLED=1"
    assert mpi_setup.takes_gpu_memory(cray, {"MPICH_GPU_SUPPORT_ENABLED": "0"}) == ""
