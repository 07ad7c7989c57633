"""NCCL within a host and MPI between hosts: what is enqueued on one rank, on a stand-in."""

from typing import Any

import numpy as np
import pytest

from mpistrat.collectives.local import ThreadData, ThreadGroup
from mpistrat.collectives.nccl_hosts import HostsLane, NcclHosts
from mpistrat.collectives.staged import StagedData
from mpistrat.errors import EngineError
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.choice import Found, why_not_nccl
from mpistrat.gpu.nccl_types import BFLOAT16, FLOAT16, FLOAT32, OPERATIONS
from mpistrat.gpu.plane import Completion
from mpistrat.messages import ReduceOp
from mpistrat.scale import IDENTITY, Scale
from tests.gpu_stand_in import Communicator, Device

SUM = OPERATIONS[ReduceOp.SUM]


class Across(ThreadData):
    """Between the hosts; knows what it has reduced."""

    def __init__(self) -> None:
        super().__init__(ThreadGroup(1), 0)
        self.dtypes: list[str] = []

    def allreduce(self, sources: Any, targets: Any, *how: Any) -> None:
        self.dtypes += [source.dtype.name for source in sources]
        super().allreduce(sources, targets, *how)


class Job:
    """A plane over one rank on one host."""

    def __init__(self, buffer_bytes: int = 2**12):
        self.device = Device()
        self.across = host = Across()
        lane = HostsLane(self.device, Communicator(self.device, 1), [self.device.scratch(buffer_bytes + 32)
                                                                    for _ in range(2)], 0, 1, host, buffer_bytes, 10.0)
        self.plane = NcclHosts(self.device, 0, [lane], buffer_bytes, StagedData(self.device, 0, host, 10.0))

    def arrays(self, *values: np.ndarray) -> list[GpuArray]:
        """The values on the stand-in."""
        made = [self.device.seen(self.device.tensor(value)) for value in values]
        self.device.run_all()
        return made

    def done(self, completion: Completion) -> None:
        """Let the stand-in do what was enqueued."""
        while not completion.done:
            pass

    @property
    def calls(self) -> list[str]:
        """The names of what was enqueued."""
        return [entry[0] for entry in self.device.log]


def test_a_bucket_is_scattered_in_the_host_and_gathered_when_the_hosts_have_reduced_it() -> None:
    job = Job()
    sources = job.arrays(np.arange(5, dtype=np.float32), np.ones(2, np.float32))
    targets = job.arrays(np.zeros(5, np.float32), np.zeros(2, np.float32))
    job.plane.allreduce(sources, targets, ReduceOp.SUM, 2.0, Scale(1.0, 4))
    assert job.calls == ["batched_copy", "reduceScatter"]
    job.done(job.plane.finish())
    assert job.calls == ["batched_copy", "reduceScatter", "allGather", "batched_copy"]
    assert [entry[:3] for entry in job.device.log if entry[0] in ("reduceScatter", "allGather")] == [
        ("reduceScatter", 12, FLOAT32), ("allGather", 12, FLOAT32)]
    assert [target.owner.view().tolist() for target in targets] == [[0, 0.5, 1, 1.5, 2], [0.5, 0.5]]


def test_the_next_bucket_is_scattered_before_the_hosts_reduce_the_one_before() -> None:
    job = Job()
    for pair in [job.arrays(np.ones(4), np.ones(4)) for _ in range(2)]:
        job.plane.allreduce(pair, pair, ReduceOp.SUM, 1.0, IDENTITY)
    assert job.calls == ["batched_copy", "reduceScatter"] * 2 + ["allGather", "batched_copy"]


@pytest.mark.parametrize("dtype", ["float32", "int16", "complex64"])
def test_a_tensor_larger_than_a_buffer_is_cut_into_pieces(dtype: str) -> None:
    job = Job(buffer_bytes=2**10)
    values = np.arange(1000).astype(dtype)
    source, target = job.arrays(values, np.zeros_like(values))
    assert job.plane.why_not([source], ReduceOp.SUM) == ""
    job.plane.allreduce([source], [target], ReduceOp.SUM, 1.0, IDENTITY)
    job.done(job.plane.finish())
    np.testing.assert_array_equal(target.owner.view(), values)
    assert job.calls.count("reduceScatter") == {"float32": 4, "int16": 4, "complex64": 8}[dtype]


@pytest.mark.parametrize("wire, number", [("float16", FLOAT16), ("bfloat16", BFLOAT16)])
def test_halves_travel_between_hosts_too(wire: str, number: int) -> None:
    job = Job()
    source, target = job.arrays(np.arange(5, dtype=np.float32), np.zeros(5, np.float32))
    job.plane.allreduce([source], [target], ReduceOp.SUM, 1.0, Scale(1.0, 4), wire)
    job.done(job.plane.finish())
    assert [entry[2] for entry in job.device.log if entry[0] in ("reduceScatter", "allGather")] == [number] * 2
    assert job.across.dtypes == [wire]
    assert target.owner.view().tolist() == [0, 0.25, 0.5, 0.75, 1]


def test_what_it_cannot_do_is_named() -> None:
    job = Job(buffer_bytes=64)
    assert "do not fit" in job.plane.why_not(job.arrays(np.ones(4), np.ones(5)), ReduceOp.SUM)
    assert job.plane.why_not(job.arrays(np.ones(2, complex)), ReduceOp.PRODUCT) == "NCCL has no product of complex128"


def test_hosts_of_different_numbers_of_ranks_are_an_error() -> None:
    with pytest.raises(EngineError, match="MPISTRAT_GPU_OPERATIONS=hierarchical: the hosts have different numbers"):
        why_not_nccl([Found("gpu 0", 22805, 2**27, False)], "hierarchical", "the hosts have different numbers of ranks")
