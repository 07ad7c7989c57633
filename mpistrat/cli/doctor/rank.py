"""One rank of `mpistrat doctor`: `mpirun -np 2 python -m mpistrat.cli.doctor.rank 2`.

The rank prints each fact as one line of JSON, as soon as the fact is known. So the facts about the rank's host, which
need no other rank, are printed even if MPI ends the rank, or if no other rank can be reached. Started by
doctor_command.py, under mpirun or srun.
"""

import dataclasses
import os
import platform
import statistics
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

from ...api import array_ops, common, runtime
from ...core.errors import MpistratError
from ...process.launch_env import launched_rank
from ..findings import say
from . import links
from .facts import collect

if TYPE_CHECKING:
    from mpi4py import MPI

_COUNT = 1024  # float32 elements of the all-reduce
_ROUNDS, _WARM_UP_ROUNDS = 50, 5
_LARGE_BYTES, _LARGE_ROUNDS = 64 * 2**20, 12  # bytes of all ranks together
_FLUSH_S = 0.3  # mpirun may lose what a rank prints just before it ends the job.


def main(expected: int) -> int:
    """Return 0 if all measurements were made and the all-reduce gave the right result, else 1. Collective."""
    rank = launched_rank(os.environ)
    say("facts", **dataclasses.asdict(collect(rank)))
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    vendor, version = MPI.get_vendor()
    say("mpi", rank=rank, size=comm.Get_size(), vendor=vendor, version=".".join(map(str, version)),
        shared_memory=common.why_no_shared_memory())
    if comm.Get_size() != expected:
        return 1
    try:
        _measure_links(comm)
    except links.NoAnswerError:
        time.sleep(_FLUSH_S)
        comm.Abort(1)
    try:
        return _allreduce()
    except MpistratError as error:
        say("error", rank=rank, text=str(error))
        return 1


def _measure_links(comm: "MPI.Intracomm") -> None:
    """Measure the links between the hosts, one after the other. Collective.

    Raises NoAnswerError: Ranks do not reach each other. The ranks that noticed have printed a "silence" line.
    """
    rank = comm.Get_rank()
    try:
        host_of = links.hosts_of(comm, platform.node())
    except links.NoAnswerError:
        say("silence", ranks=[], hosts=[])
        raise
    firsts = links.first_ranks(host_of)
    for one, other in links.pairs(len(firsts)):
        ranks = firsts[one], firsts[other]
        hosts = host_of[ranks[0]], host_of[ranks[1]]
        if rank in ranks:
            try:
                link = links.measure(comm, hosts, ranks)
            except links.NoAnswerError:
                say("silence", ranks=ranks, hosts=hosts)
                raise
            if link is not None:
                say("link", **dataclasses.asdict(link))
        links.wait(comm.Ibarrier(), limit_s=4 * links.WAIT_S, nap_s=0.001)


def _allreduce() -> int:
    """All-reduce numbers whose sum is known. Collective; rank 0 prints the result.

    Raises MpistratError: init() or the all-reduce has failed.
    """
    common.init()
    rank, size = common.rank(), common.size()
    array = np.arange(_COUNT, dtype=np.float32) + rank
    # All terms are small integers, so the sum is exact in float32.
    right = size * np.arange(_COUNT, dtype=np.float32) + size * (size - 1) / 2
    seconds = []
    is_right = True
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        began = time.perf_counter()
        result = array_ops.allreduce(array, op=common.Sum, name="doctor")
        seconds.append(time.perf_counter() - began)
        is_right = is_right and bool(np.array_equal(result, right))
    # Large arrays, after which the ranks have chosen the chunk size. With several hosts ranks choose nothing.
    large = np.ones(_LARGE_BYTES // size // 4, np.float32)
    for _ in range(_LARGE_ROUNDS if len(common.hosts()) == 1 else 0):
        is_right = is_right and bool((array_ops.allreduce(large, op=common.Sum, name="doctor.large") == size).all())
    is_right_everywhere = all(array_ops.allgather_object(is_right))
    if rank == 0:
        choices = runtime.group_of("doctor", 0).traced.choices()
        say("allreduce", right=is_right_everywhere, hosts=common.hosts(), bytes=array.nbytes,
            seconds=statistics.median(seconds[_WARM_UP_ROUNDS:]), choices=choices)
    is_right_on_gpus = _allreduce_on_gpus()
    common.shutdown()
    return 0 if is_right_everywhere and is_right_on_gpus else 1


def _allreduce_on_gpus() -> bool:
    """All-reduce such numbers on GPUs, if all ranks have cupy and a GPU. Collective; each rank prints its findings.

    The all-reduce runs three times. The first two runs are also done on the CPU, and the results compared.
    """
    if not all(array_ops.allgather_object(common.gpu_available())):
        return True
    import cupy
    rank, size = common.rank(), common.size()
    with cupy.cuda.Device(common.local_rank() % cupy.cuda.runtime.getDeviceCount()):
        arrays = [cupy.arange(count, dtype=cupy.float32) + rank for count in (_COUNT, 3)]
        is_right = True
        for _ in range(3):
            results = array_ops.grouped_allreduce(arrays, op=common.Sum, name="doctor.gpu")
            is_right = is_right and all(bool((result == size * cupy.arange(len(result)) + size * (size - 1) / 2).all())
                                        for result in results)
    found = runtime.group_of("doctor", 0).engine.controller.executor.device.findings
    say("gpu", rank=rank, right=is_right, findings=list(found))
    return all(array_ops.allgather_object(is_right))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
