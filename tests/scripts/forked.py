"""Every rank forks while a collective is under way, and then goes on. What the child does is named by the argument."""

import os
import sys
from typing import Any

import numpy as np
from children import LIMIT_S, exit_status
from reporting import attempt, say

import mpistrat


def raise_error() -> None:
    """End as a script does that fails."""
    raise RuntimeError("failed in the child")


def call_everything() -> None:
    """Say what each call does. A pending result is the parent's: nothing in this process completes it."""
    array = np.ones(3)
    attempt(mpistrat.rank)
    attempt(mpistrat.size)
    attempt(mpistrat.is_initialized)
    for call in (lambda: mpistrat.allreduce(array), lambda: mpistrat.allreduce_async(array),
                 lambda: mpistrat.allgather(array), lambda: mpistrat.broadcast(array, 0), mpistrat.barrier,
                 lambda: mpistrat.broadcast_object("text"), lambda: mpistrat.allgather_object("text"), mpistrat.join,
                 lambda: mpistrat.add_process_set([0]), mpistrat.init, pending.wait):
        attempt(call)
    attempt(mpistrat.shutdown)


ways = {"ends": lambda: None, "exits with 5": lambda: sys.exit(5), "raises": raise_error, "calls": call_everything}


def submit(rank: int) -> Any:
    """A sum that is complete when all ranks have submitted it."""
    return mpistrat.allreduce_async(np.ones(3), op=mpistrat.Sum, name=f"pending {rank}")


mpistrat.init()
mpistrat.barrier()
own = mpistrat.rank()
pending = submit(own)
child = os.fork()
if child == 0:
    ways[sys.argv[1]]()
    sys.exit()
say(exit_status(child))
sums = [pending if rank == own else submit(rank) for rank in range(mpistrat.size())]
say(f"sums {[float(each.wait(LIMIT_S)[0]) for each in sums]}")
