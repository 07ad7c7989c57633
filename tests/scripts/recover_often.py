"""Recover again and again, without a loss, and print what the process has after the first times and after the last.

Under `mpirun --with-ft ulfm`. The garbage collector is off: it would free in time what is left behind.
"""

import gc
import json
import threading

import numpy as np
import psutil

import mpistrat
from mpistrat.api import runtime
from mpistrat.api.elastic import recover
from mpistrat.core.errors import RanksLostError


def held() -> dict[str, int]:
    with open("/proc/self/maps", encoding="utf-8") as file:
        shared = sum("memfd" in line for line in file)
    process = psutil.Process()
    return {"descriptors": process.num_fds(), "Python's threads": threading.active_count(),
            "threads": process.num_threads(), "shared memories": shared, "MiB": process.memory_info().rss >> 20}


gc.disable()
mpistrat.init()
rank, pair = mpistrat.rank(), mpistrat.add_process_set([0, 1])
found = []
for _ in range(20):
    for _ in range(5):
        mpistrat.allreduce(np.ones(500_000))
        mpistrat.allgather(np.ones(1_000_000))
        if pair.included():
            mpistrat.allreduce(np.ones(1000), process_set=pair)
    found.append(held())
    mpistrat.barrier()
    runtime.current().losses.lose(())
    try:
        mpistrat.allreduce(np.ones(3))
    except RanksLostError:
        recover()
print(f"rank {rank}: {json.dumps([found[2], found[-1]])}", flush=True)
