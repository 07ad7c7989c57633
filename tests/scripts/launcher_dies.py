"""Every rank does what is named first, for ever, with a worker process beside it. Rank 0 makes a file once all do.

usage: launcher_dies.py WAY FILE [kills]

With "kills" rank 0 then kills its launcher, and writes into the file when it did so. The ranks have no worker processes
then: with several hosts, MPI itself ends a rank whose connection to another host closes, and not its workers.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mpistrat
from mpistrat.process.launcher_watch import launcher_here


def sleep() -> None:
    """Outside of Python's and of MPI's hands."""
    time.sleep(3600)


def compute() -> None:
    """With Python's lock held most of the time."""
    while True:
        sum(range(1000))


def reduce() -> None:
    while True:
        mpistrat.allreduce(np.ones(10), name="endless")


def wait() -> None:
    """In a collective that rank 0 never comes to."""
    sleep() if mpistrat.rank() == 0 else mpistrat.barrier("never")


def wait_at_the_end() -> None:
    """For rank 0, in shutdown()."""
    sleep() if mpistrat.rank() == 0 else mpistrat.shutdown()


def kill_launcher() -> None:
    """From a thread, while this rank does what is named."""
    launcher = launcher_here(os.environ)
    assert launcher is not None
    Path(mark).write_text(str(time.time()))
    os.kill(launcher.pid, signal.SIGKILL)


way, mark, *kills = sys.argv[1:]
mpistrat.init()
if not kills:
    multiprocessing.get_context("fork").Process(target=sleep, daemon=True).start()
mpistrat.barrier()
if mpistrat.rank() == 0:
    if kills:
        threading.Timer(1.0, kill_launcher).start()  # The other ranks do what is named by then.
    else:
        Path(mark).touch()
{"sleep": sleep, "compute": compute, "reduce": reduce, "wait": wait, "wait at the end": wait_at_the_end}[way]()
