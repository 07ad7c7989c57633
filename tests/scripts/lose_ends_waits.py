"""Losses.lose ends every kind of wait of a rank for others. Under mpirun on three ranks, of which none is lost.

For each kind rank 0 waits and the others do not come, until `lose` is called in another thread of rank 0. Then all
shut down and begin again. Rank 0 prints the kind, the error, and whether it was raised soon.
"""

import threading
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import mpistrat
from mpistrat.api import runtime
from mpistrat.core.errors import LostRank, MpistratError

LOST = [LostRank(1, "there", "as a test has it")]
SOON_S = 1.0  # It takes a tenth of that on a quiet machine.


def reducing() -> None:
    mpistrat.allreduce(np.ones(10))


def broadcasting() -> None:
    mpistrat.broadcast(np.ones(10), 1)


def in_flight() -> None:
    mpistrat.allreduce_async(np.ones(1000), name="in flight").wait()


def in_agreement() -> None:
    """The other rank comes to no vote, after votes on the same operation."""
    for _ in range(10):
        mpistrat.allreduce(np.ones(10))
    mpistrat.allreduce(np.ones(10))


def in_set() -> None:
    mpistrat.allreduce(np.ones(10), process_set=BOTH)


def in_shutdown() -> None:
    mpistrat.shutdown()


def in_backend() -> None:
    """The ranks have agreed, and the other one does not take part in the collective itself."""
    runtime.current().engine.controller.executor.data.allgather(np.ones(5), np.empty(15), [5, 5, 5])


KINDS: list[tuple[Callable[[], object], int]] = [  # and how many steps the others make with it
    (reducing, 0), (broadcasting, 0), (mpistrat.barrier, 0), (mpistrat.join, 0), (in_flight, 0), (in_set, 0),
    (in_backend, 0), (in_shutdown, 0), (in_agreement, 10)]


def wait_and_say(kind: Callable[[], object]) -> None:
    """Call `kind`, which waits; say how that ends."""
    called: list[float] = []

    def lose() -> None:
        called.append(time.monotonic())
        runtime_of_rank_0.losses.lose(LOST)
    runtime_of_rank_0 = runtime.current()
    timer = threading.Timer(0.3, lose)
    timer.start()
    error = "no error"
    try:
        kind()
    except MpistratError as raised:
        error = type(raised).__name__
    soon = time.monotonic() - called[0] < SOON_S
    timer.join()
    later = ""
    if kind is not in_shutdown:
        try:
            mpistrat.allreduce(np.ones(1))
        except MpistratError as raised:
            later = f"; later {type(raised).__name__}"
    print(f"rank 0: {kind.__name__}: {error} {'soon' if soon else 'late'}{later}", flush=True)


for kind, steps in KINDS:
    mpistrat.init()
    BOTH = mpistrat.ProcessSet([0, 1])
    mpistrat.add_process_set(BOTH)
    if mpistrat.rank() == 0:
        wait_and_say(kind)
    else:
        for _ in range(steps):
            mpistrat.allreduce(np.ones(10))
    MPI.COMM_WORLD.barrier()
    if mpistrat.is_initialized():
        runtime.current().losses.lose(LOST)
        mpistrat.shutdown()
print(f"rank {MPI.COMM_WORLD.Get_rank()}: done", flush=True)
