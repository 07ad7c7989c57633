"""init(comm=...) on fewer ranks than were started; each rank says what it sees."""

import sys

import numpy as np
from mpi4py import MPI
from reporting import attempt, say

import mpistrat


def view() -> str:
    total = mpistrat.allreduce(np.float64(MPI.COMM_WORLD.Get_rank()), op=mpistrat.Sum)
    return f"rank {mpistrat.rank()} of {mpistrat.size()}, sum {total:g}"


world = MPI.COMM_WORLD
last = world.Get_size() - 1
if sys.argv[1] == "list":
    # All but rank 1.
    ranks = [rank for rank in range(world.Get_size()) if rank != 1]
    attempt(lambda: mpistrat.init(comm=ranks))
    if world.Get_rank() != 1:
        attempt(view)
elif sys.argv[1] == "communicator":
    # The last rank first, the others behind it; rank 1 by itself.
    comm = world.Split(color=world.Get_rank() == 1, key=-world.Get_rank())
    mpistrat.init(comm=comm)
    attempt(view)
    mpistrat.shutdown()
    say(f"the communicator still has {comm.allreduce(1)} ranks")
else:
    attempt(lambda: mpistrat.init(comm=[0, last + 1]))
    attempt(lambda: mpistrat.init(comm=[0, 0, last]))
    attempt(mpistrat.is_initialized)
say("ends")
