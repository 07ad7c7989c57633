"""Rank 1 ends in the way that is named, and the others go on without it. Under `mpirun --with-ft ulfm`."""

import atexit
import os
import signal
import sys

import numpy as np


def registered_first() -> None:
    """Runs last at exit: what was registered before init()."""
    print("the first handler has run", flush=True)


atexit.register(registered_first)

import mpistrat  # noqa: E402
from mpistrat.api.elastic import recover  # noqa: E402
from mpistrat.core.errors import RanksLostError  # noqa: E402

mpistrat.init()
rank = mpistrat.rank()
mpistrat.allreduce(np.ones(100))
if rank == 1:
    if sys.argv[1] == "raises":
        raise KeyError("a mistake")
    if sys.argv[1] == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        mpistrat.allreduce(np.ones(100))
except RanksLostError as error:
    print(f"rank {rank}: lost {[each.rank for each in error.lost]}", flush=True)
recover()
print(f"rank {rank}: sum {mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0]}", flush=True)
sys.exit(int(sys.argv[2]))
