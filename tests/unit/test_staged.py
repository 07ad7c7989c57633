"""GPU tensors by way of the host, on a stand-in."""

import numpy as np
import pytest

from mpistrat.core.arithmetic import Reduction, Scale
from mpistrat.core.errors import EngineError
from mpistrat.core.request import ReduceOp
from mpistrat.gpu.arrays import GpuArray
from mpistrat.gpu.staged import StagedData
from tests.support.gpu_backends import allreduce
from tests.support.gpu_stand_in import Device
from tests.support.thread_group import ThreadGroup


def on_gpu(device: Device, *values: np.ndarray) -> list[GpuArray]:
    """The values on the stand-in, once its streams have run."""
    return [device.seen(device.tensor(value)) for value in values]


@pytest.mark.parametrize("seed", range(5))
def test_buckets_of_many_sizes_are_reduced_on_the_host(seed: int) -> None:
    device = Device(seed=seed)
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 10.0)
    for bucket in range(3):
        values = [np.arange(count, dtype=np.float32) + bucket for count in (1, 100, 0, 7, 33)]
        sources, targets = on_gpu(device, *values), on_gpu(device, *map(np.zeros_like, values))
        plane.wait_for([device.record()])
        allreduce(plane, sources, targets, Reduction(ReduceOp.SUM, 2.0, Scale(1.0, 4)))
        assert plane.finish() == []
        for target, value in zip(targets, values):
            np.testing.assert_array_equal(target.owner.view(), value / 2)


def test_rows_and_broadcasts_come_back() -> None:
    device = Device()
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 10.0)
    sources = on_gpu(device, np.arange(50, dtype=np.int16), np.array([True, False]))
    targets = on_gpu(device, np.zeros(50, np.int16), np.zeros(2, bool))
    plane.wait_for([device.record()])
    plane.broadcast(sources[:1], targets[:1], 0)
    plane.allgather(sources[1], targets[1], [2])
    device.run_all()
    assert targets[0].owner.view().tolist() == list(range(50))
    assert targets[1].owner.view().tolist() == [True, False]


def test_a_copy_that_never_ends_is_an_error() -> None:
    device = Device()
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 0.05)
    source, = on_gpu(device, np.ones(3))
    never = device.record(device.stream())
    never.fire = lambda: False  # type: ignore[method-assign]
    device._streams[-1].work.clear()
    plane.wait_for([never])
    with pytest.raises(EngineError, match=r"a copy between GPU and host is not complete after 0\.05 s"):
        allreduce(plane, [source], [source], Reduction(ReduceOp.SUM))


def test_a_scatter_and_an_exchange_of_one_rank_give_back_what_they_got() -> None:
    device = Device()
    plane = StagedData(device, 0, ThreadGroup(1).data(0), 10.0)
    source, reduced, sent = on_gpu(device, np.arange(4.0), np.zeros(4), np.zeros(4))
    plane.wait_for([device.record()])
    plane.reducescatter(source, reduced, [4], Reduction(ReduceOp.SUM, 0.5, Scale(4.0)))
    plane.alltoall(source, sent, [4], [4], 4)
    device.run_all()
    assert reduced.owner.view().tolist() == [0, 2, 4, 6]
    assert sent.owner.view().tolist() == [0, 1, 2, 3]
