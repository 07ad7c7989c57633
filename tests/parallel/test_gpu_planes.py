"""What moves GPU arrays, on a stand-in: scatter and exchange of every dtype; and how NCCL's communicators are made."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpistrat.core.arithmetic import IDENTITY, Reduction, Scale
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.backend import GpuBackend, StagedData
from mpistrat.gpu.connect import exchange_over, make_communicators
from mpistrat.gpu.nccl_data import AVERAGES_FROM, NcclData
from tests.support.gpu_stand_in import Communicator, Device
from tests.support.planes import over_mpi

REAL = [np.dtype(name) for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16",
                                    "float32", "float64")] + [np.dtype(ml_dtypes.bfloat16)]
COMPLEX = [np.dtype("complex64"), np.dtype("complex128")]


class Job:
    def __init__(self, name: str, rank: int, size: int):
        self.device = Device(seed=rank)
        self.host = over_mpi()
        staged = StagedData(self.device, rank, self.host, 60.0)
        buffers = [self.device.scratch(2**16) for _ in range(4)]
        self.plane: GpuBackend = {
            "staged": lambda: staged,
            "nccl": lambda: NcclData(
                self.device, rank, size, [Communicator(self.device, size, rank, (stream,)) for stream in range(2)],
                [buffers[:2], buffers[2:]], 2**16, AVERAGES_FROM)}[name]()

    def array(self, values: np.ndarray) -> GpuArray:
        """The values, which come late."""
        return self.device.seen(self.device.tensor(values))

    def result(self, target: GpuArray) -> np.ndarray:
        events = self.plane.finish()
        while not all(event.done for event in events):
            pass
        return np.asarray(target.owner.view().copy())

    def ready(self) -> None:
        """Let the plane wait for the arrays made so far."""
        self.plane.wait_for([self.device.record()])


@pytest.fixture(params=["nccl", "staged"])
def job(request: pytest.FixtureRequest, rank: int, size: int) -> Iterator[Job]:
    made = Job(request.param, rank, size)
    yield made
    made.plane.close()
    made.host.close()


def scattered(job: Job, values: np.ndarray, counts: list[int], rank: int, op: ReduceOp = ReduceOp.SUM,
              prescale: float = 1.0, scale: Scale = IDENTITY) -> np.ndarray:
    source, target = job.array(values), job.array(np.zeros(counts[rank], values.dtype))
    job.ready()
    assert job.plane.why_not_scatter(source, Reduction(op, prescale)) == ""
    job.plane.reducescatter(source, target, counts, Reduction(op, prescale, scale))
    return job.result(target)


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX], ids=str)
@pytest.mark.parametrize("is_even", [True, False], ids=["even", "uneven"])
def test_every_rank_gets_its_part_of_a_sum(is_even: bool, dtype: np.dtype, job: Job, rank: int, size: int) -> None:
    counts = [3] * size if is_even else [2 * r for r in range(size)]
    values = (np.arange(sum(counts)) + rank).astype(dtype)
    first = sum(counts[:rank])
    expected = (np.arange(first, first + counts[rank]) * size + size * (size - 1) // 2).astype(dtype)
    np.testing.assert_array_equal(scattered(job, values, counts, rank), expected)


@pytest.mark.parametrize("op, of_all", [(ReduceOp.MIN, min), (ReduceOp.MAX, max)], ids=["min", "max"])
def test_every_rank_gets_its_part_of_an_extreme(op: ReduceOp, of_all: Any, job: Job, rank: int, size: int) -> None:
    result = scattered(job, np.full(size, size - rank, np.uint16), [1] * size, rank, op)
    assert result.tolist() == [of_all(range(1, size + 1))]


def test_a_part_is_scaled_on_both_sides(job: Job, rank: int, size: int) -> None:
    values = np.full(2 * size, rank + 1, np.float16)
    result = scattered(job, values, [2] * size, rank, prescale=0.5, scale=Scale(4.0, 2))
    assert result.tolist() == [size * (size + 1) / 2] * 2


@pytest.mark.parametrize("dtype", [*REAL, *COMPLEX, np.dtype(bool)], ids=str)
def test_every_rank_sends_each_other_one_its_own_number_of_elements(dtype: np.dtype, job: Job, rank: int,
                                                                    size: int) -> None:
    # Rank r sends r + peer elements of value 10 r + peer to each peer; rank 0 sends itself none.
    source = job.array(np.concatenate([np.full(rank + peer, 10 * rank + peer) for peer in range(size)]).astype(dtype))
    expected = np.concatenate([np.full(rank + peer, 10 * peer + rank) for peer in range(size)]).astype(dtype)
    target = job.array(np.zeros_like(expected))
    counts = [rank + peer for peer in range(size)]
    job.ready()
    job.plane.alltoall(source, target, counts, counts, max(counts))
    np.testing.assert_array_equal(job.result(target), expected)


# -- NCCL's communicators when one rank fails before, or while, they are made ------------------------------------------


@pytest.fixture
def exchange(size: int) -> Iterator[Any]:
    host = over_mpi()
    yield exchange_over(host, size)
    host.close()


def test_all_ranks_leave_at_once_when_one_cannot_connect(exchange: Any, rank: int, size: int) -> None:
    in_nccl = threading.Event()

    def make() -> list[Any]:
        if rank == size - 1:
            raise MemoryError("no memory for a communicator")
        in_nccl.wait(60)  # as ncclCommInitRank does, until all ranks have called it
        return []

    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"rank {size - 1}: no memory for a communicator\. Set MPISTRAT_GPU"):
        make_communicators(make, Device(), rank, exchange, 60.0)
    assert time.monotonic() - began < 30
    in_nccl.set()


def test_ranks_that_take_longer_are_waited_for(exchange: Any, rank: int, size: int) -> None:
    def make() -> list[Any]:
        time.sleep(0.2 * rank)
        return [communicator]

    device = Device(seed=rank)
    communicator = device.communicator(size, (7,), rank)
    assert make_communicators(make, device, rank, exchange, 60.0) == [communicator]
    assert [entry[0] for entry in device.log] == ["allReduce"]
    communicator.destroy()


def test_values_of_different_lengths_are_exchanged(exchange: Any, size: int, rank: int) -> None:
    assert exchange("x" * rank) == ["x" * r for r in range(size)]
    assert exchange([rank, None, [], "\udce4"]) == [[r, None, [], "\udce4"] for r in range(size)]


def test_init_of_several_ranks_sets_the_variables_of_cuda(size: int) -> None:
    names = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
    assert size == 1 or [os.environ[name] for name in names] == ["32", "EAGER"]
