"""The first rank sends SIGINT to `mpistrat run`. All ranks are interrupted in the same step; the first one saves then.

    mpistrat run -np 2 python tests/scripts/interrupted.py goes on|raises|again
"""

import os
import signal
import sys
import time

import numpy as np

import mpistrat

way, launcher = sys.argv[1], int(os.environ["_MPISTRAT_RUN"].partition("-")[0])
mpistrat.init()
rank, step = mpistrat.rank(), 0
try:
    while True:
        step += 1
        mpistrat.allreduce(np.float32(step), name="step")
        time.sleep(0.01 * (rank + 1))
        if step == 20 and rank == 0:
            os.kill(launcher, signal.SIGINT)
        assert step < 2000, "the signal has not come"
except KeyboardInterrupt:
    steps = mpistrat.allgather_object(step, name="save")  # As a save in which all ranks take part.
    if rank == 0:
        print(f"interrupted in steps {steps}", flush=True)
        if way == "again":
            time.sleep(0.5)  # Two signals within 0.3 s are one.
            os.kill(launcher, signal.SIGINT)
            time.sleep(60)
        time.sleep(1)
        print("saved", flush=True)
    if way == "raises":
        raise
print(f"rank {rank} goes on", flush=True)
