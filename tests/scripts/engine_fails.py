"""The engine of rank 1 fails while it executes; the exception is not caught."""

import numpy as np

import mpistrat
from mpistrat.execution import Executor


def fail(self: Executor, entries: list) -> None:
    raise MemoryError("no memory, on purpose")


mpistrat.init()
mpistrat.barrier()
if mpistrat.rank() == 1:
    Executor.execute = fail
mpistrat.allreduce(np.ones(100_000), name="large")
