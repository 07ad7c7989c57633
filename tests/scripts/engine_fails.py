"""The engine of rank 1 fails while it executes; the exception is not caught."""

from typing import Any

import numpy as np

import mpistrat
from mpistrat.engine.executor import Executor


def fail(*_: Any, **__: Any) -> None:
    raise MemoryError("no memory, on purpose")


mpistrat.init()
mpistrat.barrier()
if mpistrat.rank() == 1:
    Executor.execute = fail  # type: ignore[method-assign]
mpistrat.allreduce(np.ones(100_000), name="large")
