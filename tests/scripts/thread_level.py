"""MPI is initialised by the script, with the thread level that is named in the argument, before mpistrat's init."""

import sys

import mpi4py
import numpy as np
from reporting import attempt

mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI  # noqa: E402, F401

import mpistrat  # noqa: E402


def init_and_sum() -> float:
    mpistrat.init()
    return float(mpistrat.allreduce(np.float64(1), op=mpistrat.Sum))


attempt(init_and_sum)
