"""One rank without mpirun: every operation works, and no MPI library is loaded."""

import sys

import numpy as np
from reporting import attempt, say

import mpistrat

mpistrat.init()
attempt(lambda: (mpistrat.rank(), mpistrat.size(), mpistrat.local_size(), mpistrat.mpi_enabled()))
attempt(lambda: mpistrat.allreduce(np.array([1.0, 2.0])).tolist())
attempt(lambda: mpistrat.allgather(np.array([3, 4])).tolist())
attempt(lambda: mpistrat.broadcast(np.array([5]), 0).tolist())
attempt(lambda: mpistrat.allgather_object("own"))
attempt(mpistrat.barrier)
attempt(lambda: sorted(name for name in sys.modules if name.startswith(("mpi4py", "tensorflow", "keras"))))
with open("/proc/self/maps") as maps:
    say(f"libmpi is loaded: {'libmpi' in maps.read()}")
say("ends")
