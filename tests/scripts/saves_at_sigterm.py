"""The first rank sends SIGTERM to `mpistrat run`. All ranks agree on it after a step, save for SECONDS, and end well.

usage: mpistrat run -np 2 python tests/scripts/saves_at_sigterm.py SECONDS
"""

import os
import signal
import sys
import time

import numpy as np

import mpistrat

got: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
mpistrat.init()
mpistrat.barrier()  # All ranks are connected.
if mpistrat.rank() == 0:
    os.kill(int(os.environ["_MPISTRAT_RUN"].partition("-")[0]), signal.SIGTERM)
until = time.monotonic() + 60
while not mpistrat.allreduce(np.float32(bool(got)), op=mpistrat.Max):
    assert time.monotonic() < until, "SIGTERM has not come"
    time.sleep(0.05)
time.sleep(float(sys.argv[1]))
print(f"rank {mpistrat.rank()} has saved after {len(got)} signals")
