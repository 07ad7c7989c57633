"""A worker of a cluster dies. The others say when they end, and whether MPI will then wait for it."""

import atexit
import ctypes
import os
import signal
import time

from mpi4py import MPI
from reporting import say

import mpistrat
from mpistrat.cluster import form


def say_how_mpi_ends() -> None:
    waits = not ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_async_mpi_finalize").value
    say(f"MPI_Finalize {'waits' if waits else 'does not wait'}")


mpistrat.init()
# Before the cluster's own, and so run after it.
atexit.register(say_how_mpi_ends)
cluster = form({"chief": 1, "worker": mpistrat.size() - 2, "ps": 1})
if mpistrat.rank() == 1:
    time.sleep(0.5)  # so that the others have formed the cluster, too
    os.kill(os.getpid(), signal.SIGKILL)
if cluster.role is mpistrat.Role.CHIEF:
    while 1 in cluster._workers:
        time.sleep(0.01)
else:
    cluster.wait_for_chief()
say("ends")
