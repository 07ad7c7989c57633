"""Print what the recorder costs.

    mpirun -np 2 python tests/scripts/trace_cost.py [RUNS]

The first line is the time of what the engine does for the recorder in each operation, and its share of a step of 5 ms
with 20 operations. Then follow the median and the mean time of an `allreduce` of 1 KB on an array with the recorder and
without it, of jobs that run in turn in the same processes.
"""

import os
import statistics
import sys
import time
import timeit

import numpy as np

import mpistrat
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.request import ScaledOp, Sum, allreduce_request, specs_of
from mpistrat.trace.ring import OperationRing

RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
OPERATIONS = 5000
STEP_S, OPERATIONS_OF_STEP = 5e-3, 20


def recorded() -> None:
    entry.submitted = time.monotonic_ns()
    entry.agreed, entry.number = time.monotonic_ns(), 1
    ring.add(entry, 1, entry.agreed, time.monotonic_ns())


def allreduce_s() -> tuple[float, float]:
    """The median and the mean time of an operation, in a job of its own."""
    mpistrat.init()
    times = []
    for _ in range(OPERATIONS):
        began = time.perf_counter()
        mpistrat.allreduce(array, name="x")
        times.append(time.perf_counter() - began)
    mpistrat.shutdown()
    return statistics.median(times), statistics.fmean(times)


array = np.ones(256, np.float32)
entry = Entry(allreduce_request("x", specs_of([array]), ScaledOp(Sum)), [array], Handle("x"))
ring = OperationRing(4096)
# The least of many short runs, so that other programs on the cores do not count.
cost_s = min(timeit.repeat(recorded, number=1000, repeat=200)) / 1000
found: dict[str, list[tuple[float, float]]] = {"all": [], "0": []}
for _ in range(RUNS):
    for setting, times in found.items():
        os.environ["MPISTRAT_RECORDER"] = setting
        times.append(allreduce_s())
mpistrat.init()
if mpistrat.rank() == 0:
    print(f"recorder: {cost_s * 1e6:.2f} us per operation, {OPERATIONS_OF_STEP * cost_s / STEP_S:.2%} of a step of "
          f"{STEP_S * 1e3:g} ms with {OPERATIONS_OF_STEP} operations")
    for setting, times in found.items():
        for what, figures in zip(("median", "mean"), zip(*times), strict=True):
            print(f"allreduce of 1 KB, recorder {'on' if setting == 'all' else 'off'}, {what} of each job: "
                  f"{', '.join(f'{each * 1e6:.1f}' for each in figures)}; their median "
                  f"{statistics.median(figures) * 1e6:.1f} us")
