"""Operations before init, between init and shutdown, and after shutdown, in a first and in a second life.

MPI is initialised by init(), as Horovod's documentation has it for scripts that use mpi4py too.
"""

import atexit

import mpi4py
import numpy as np
from reporting import attempt, say

import mpistrat


def total() -> float:
    return float(mpistrat.allreduce(np.float64(mpistrat.rank() + 1), op=mpistrat.Sum))


def about_mpi() -> tuple:
    from mpi4py import MPI
    assert MPI.COMM_WORLD.Get_size() >= mpistrat.size()
    return MPI.Is_initialized(), MPI.Query_thread() == MPI.THREAD_MULTIPLE, mpistrat.mpi_threads_supported()


def is_finalized() -> bool:
    from mpi4py import MPI
    return MPI.Is_finalized()


mpi4py.rc.initialize = False
atexit.register(lambda: attempt(is_finalized))
say("before init")
attempt(total)
attempt(mpistrat.rank)
attempt(mpistrat.shutdown)
say("after init")
mpistrat.init()
attempt(total)
attempt(about_mpi)
say("after a second init")
pending = mpistrat.allreduce_async(np.ones(3), op=mpistrat.Sum)
mpistrat.init()
attempt(lambda: float(pending.wait().sum()))
attempt(total)
say("after shutdown")
mpistrat.shutdown()
attempt(total)
attempt(mpistrat.size)
attempt(mpistrat.is_initialized)
say("after shutdown and init")
mpistrat.init()
attempt(total)
attempt(mpistrat.is_initialized)
say("ends")
