"""Steps with two gradients each, in which rank 1 comes 50 ms late, with a timeline.

    mpirun -np 2 python tests/scripts/timeline_steps.py FILE STEPS [killed]

With "killed" rank 0, which writes the file, ends by SIGKILL in the last step.
"""

import os
import signal
import sys
import time

import numpy as np

import mpistrat
from mpistrat.api import runtime
from mpistrat.core.request import Average, ScaledOp, allreduce_request, specs_of

path, steps, *ways = sys.argv[1:]
mpistrat.init()
mpistrat.start_timeline(path)
engine = runtime.current().engine
arrays = [np.ones(100_000, np.float32), np.ones(50_000, np.float32)]
for step in range(int(steps)):
    if mpistrat.rank() == 1:
        time.sleep(0.05)
    if ways == ["killed"] and step == int(steps) - 1 and mpistrat.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    handles = [engine.submit(allreduce_request(f"gradient/{place}", specs_of([array]), ScaledOp(Average),
                                               labels=("layer",)), [array]) for place, array in enumerate(arrays)]
    for handle in handles:
        handle.wait()
mpistrat.stop_timeline()
print(f"rank {mpistrat.rank()}: done", flush=True)
