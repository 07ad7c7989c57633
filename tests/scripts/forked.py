"""Every rank forks while a collective is under way, and then goes on. What the child does is named by the argument.

Tensors are made before the fork, because the child does not have TensorFlow's threads.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from reporting import attempt, say

import mpistrat

LIMIT_S = 30


def exit_status(child: int) -> str:
    """How the child ended; it is killed if it has not within the limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"the child ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "the child hangs"


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


def calls_on_tensors() -> Callable[[], None]:
    """What says what each collective on TensorFlow's tensors does."""
    import tensorflow as tf

    import mpistrat.tensorflow as hvd
    tensor, rows = tf.ones([2, 3]), tf.ones([2 * hvd.size(), 3])
    slices, variable = tf.IndexedSlices(tensor, tf.constant([0, 1]), tf.constant([4, 3])), tf.Variable(tensor)
    splits = tf.fill([hvd.size()], 1)
    calls = (
        lambda: hvd.allreduce(tensor, op=hvd.Sum), lambda: hvd.allreduce(slices),
        lambda: hvd.grouped_allreduce([tensor, rows]), lambda: hvd.allgather(tensor),
        lambda: hvd.grouped_allgather([tensor, rows]), lambda: hvd.broadcast(tensor, 0),
        lambda: hvd.broadcast_([variable], 0), lambda: hvd.broadcast_variables([variable], 0),
        lambda: hvd.reducescatter(rows), lambda: hvd.grouped_reducescatter([rows]), lambda: hvd.alltoall(rows),
        lambda: hvd.alltoall(rows, splits), hvd.barrier, hvd.join, lambda: hvd.add_process_set([0]))

    def call_all() -> None:
        for call in calls:
            attempt(call)
    return call_all


ways = {"ends": lambda: None, "exits with 5": lambda: sys.exit(5), "raises": raise_error, "calls": call_everything}


def submit(rank: int) -> Any:
    """A sum that is complete when all ranks have submitted it."""
    return mpistrat.allreduce_async(np.ones(3), op=mpistrat.Sum, name=f"pending {rank}")


mpistrat.init()
mpistrat.barrier()
own = mpistrat.rank()
if sys.argv[1] == "calls on tensors":
    ways[sys.argv[1]] = calls_on_tensors()
pending = submit(own)
child = os.fork()
if child == 0:
    ways[sys.argv[1]]()
    sys.exit()
say(exit_status(child))
sums = [pending if rank == own else submit(rank) for rank in range(mpistrat.size())]
say(f"sums {[float(each.wait(LIMIT_S)[0]) for each in sums]}")
