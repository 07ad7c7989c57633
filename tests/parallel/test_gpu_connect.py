"""NCCL's communicators when one rank fails before, or while, they are made: nobody stays behind in NCCL."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpistrat.core.errors import EngineError
from mpistrat.gpu.connect import exchange_over, make_communicators
from tests.support.gpu_stand_in import Device
from tests.support.planes import over_mpi


@pytest.fixture
def exchange(size: int) -> Iterator[Any]:
    """Among all ranks."""
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
