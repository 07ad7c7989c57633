"""Ranks, sizes and roles as every rank sees them. All ranks of this session run on one host."""

import importlib
import os

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat
from mpistrat.process.cores import physical_cores


@pytest.mark.horovod("ranks")
def test_rank_and_size_are_those_of_mpi(rank: int, size: int) -> None:
    assert (rank, size) == (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())


@pytest.mark.horovod("ranks")
def test_all_ranks_are_on_one_host(rank: int, size: int) -> None:
    assert (mpistrat.local_rank(), mpistrat.local_size()) == (rank, size)
    assert (mpistrat.cross_rank(), mpistrat.cross_size()) == (0, 1)
    assert mpistrat.is_homogeneous() is True


def test_no_two_ranks_have_a_core_in_common_unless_there_are_too_few(size: int) -> None:
    cpus_of = mpistrat.allgather_object(sorted(os.sched_getaffinity(0)))
    launcher = os.sched_getaffinity(os.getppid())
    if len(physical_cores(launcher)) < size:
        assert cpus_of == [sorted(launcher)] * size
    else:
        assert len({len(cpus) for cpus in cpus_of}) == 1
        assert len({cpu for cpus in cpus_of for cpu in cpus}) == sum(map(len, cpus_of))


def test_the_host_has_one_name_that_all_ranks_know() -> None:
    hosts = mpistrat.hosts()
    assert len(hosts) == 1 and hosts[0]
    assert mpistrat.allgather_object(hosts) == [hosts] * mpistrat.size()


def test_rank_0_is_the_chief_and_all_others_are_workers(rank: int) -> None:
    assert mpistrat.role() is (mpistrat.Role.CHIEF if rank == 0 else mpistrat.Role.WORKER)


@pytest.mark.horovod("built")
def test_what_the_run_is_made_of() -> None:
    assert mpistrat.mpi_enabled() is True
    assert mpistrat.mpi_built() is True
    assert mpistrat.mpi_threads_supported() is (MPI.Query_thread() == MPI.THREAD_MULTIPLE)
    assert mpistrat.gloo_built() is mpistrat.gloo_enabled() is False
    assert isinstance(mpistrat.nccl_built(), int)


@pytest.mark.horovod("ranks")
@pytest.mark.parametrize("door", ["mpistrat.tensorflow", "mpistrat.keras", "mpistrat.tensorflow.keras"])
def test_every_door_sees_the_same_topology(door: str) -> None:
    pytest.importorskip("tensorflow")
    module = importlib.import_module(door)
    for getter in ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hosts", "is_homogeneous",
                   "role", "is_initialized", "mpi_enabled", "mpi_built", "mpi_threads_supported", "nccl_built"):
        assert getattr(module, getter)() == getattr(mpistrat, getter)(), getter


@pytest.mark.horovod("global-set")
@pytest.mark.parametrize("door", ["mpistrat.tensorflow", "mpistrat.keras"])
def test_the_global_process_set_is_all_ranks(door: str, rank: int, size: int) -> None:
    pytest.importorskip("tensorflow")
    everybody = importlib.import_module(door).global_process_set
    assert (everybody.ranks, everybody.size(), everybody.rank(), everybody.included()) == \
        (list(range(size)), size, rank, True)


@pytest.mark.horovod("init-again")
def test_a_second_init_does_nothing(rank: int, size: int, caplog: pytest.LogCaptureFixture) -> None:
    for comm, is_told in ((None, False), (range(size), False), (MPI.COMM_WORLD, False), ([0, 9], rank == 0)):
        caplog.clear()
        mpistrat.init(comm=comm)
        assert is_told == bool(caplog.text) == ("init(comm=[0, 9]) has no effect, because the job has" in caplog.text)
    assert (mpistrat.rank(), mpistrat.size()) == (rank, size)


@pytest.mark.horovod("shutdown")
def test_after_shutdown_init_may_be_called_again(rank: int, size: int) -> None:
    mpistrat.shutdown()
    mpistrat.shutdown()
    assert not mpistrat.is_initialized()
    for call in (mpistrat.rank, mpistrat.size, mpistrat.local_rank, mpistrat.hosts, mpistrat.role, mpistrat.barrier,
                 lambda: mpistrat.allreduce(np.ones(1)), lambda: mpistrat.broadcast_object(1)):
        with pytest.raises(mpistrat.NotInitializedError, match=r"has not been initialized; use hvd\.init\(\)"):
            call()
    mpistrat.init()
    assert (mpistrat.rank(), mpistrat.size()) == (rank, size)
    assert mpistrat.allreduce(np.ones(1), op=mpistrat.Sum).tolist() == [size]


@pytest.mark.horovod("init-comm", "global-set")
def test_init_takes_a_communicator(rank: int, size: int) -> None:
    # The ranks in reverse order.
    reverse = MPI.COMM_WORLD.Split(0, -rank)
    mpistrat.shutdown()
    mpistrat.init(comm=reverse)
    try:
        assert mpistrat.rank() == size - 1 - rank
        assert mpistrat.allgather_object(rank) == list(range(size))[::-1]
        assert mpistrat.global_process_set.mpi_comm is reverse
    finally:
        mpistrat.shutdown()
        mpistrat.init()
        reverse.Free()
    assert mpistrat.rank() == rank and mpistrat.global_process_set.mpi_comm is None


def test_a_list_without_the_calling_rank_is_refused(rank: int, size: int) -> None:
    mpistrat.shutdown()
    try:
        with pytest.raises(ValueError, match=rf"rank {rank} called init with comm=\[{(rank + 1) % size}\], which does "
                                             "not contain it"):
            mpistrat.init(comm=[(rank + 1) % size])
        with pytest.raises(ValueError, match=f"distinct ranks, each from 0 to {size - 1}. Received"):
            mpistrat.init(comm=[size])
    finally:
        mpistrat.init()
    assert mpistrat.size() == size
