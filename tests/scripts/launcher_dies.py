"""Every rank does what is named first, for ever, with a worker process beside it. Rank 0 makes a file once all do."""

import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np

import mpistrat


def sleep() -> None:
    """Outside of Python's and of MPI's hands."""
    time.sleep(3600)


def compute() -> None:
    """With Python's lock held most of the time."""
    while True:
        sum(range(1000))


def reduce() -> None:
    """One small all-reduce after the other."""
    while True:
        mpistrat.allreduce(np.ones(10), name="endless")


def wait() -> None:
    """In a collective that rank 0 never comes to."""
    sleep() if mpistrat.rank() == 0 else mpistrat.barrier("never")


def wait_at_the_end() -> None:
    """For rank 0, in shutdown()."""
    sleep() if mpistrat.rank() == 0 else mpistrat.shutdown()


way, mark = sys.argv[1:]
mpistrat.init()
multiprocessing.get_context("fork").Process(target=sleep, daemon=True).start()
mpistrat.barrier()
if mpistrat.rank() == 0:
    Path(mark).write_text(str(os.getpid()))
{"sleep": sleep, "compute": compute, "reduce": reduce, "wait": wait, "wait at the end": wait_at_the_end}[way]()
