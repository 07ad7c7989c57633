"""Every rank starts a program that calls init(), as multiprocessing's "spawn" does with a script that has no guard."""

import subprocess
import sys

import numpy as np
from reporting import attempt, say

import mpistrat

if sys.argv[1:] == ["as a worker"]:
    attempt(mpistrat.init)
    attempt(mpistrat.rank)
    sys.exit(4)
mpistrat.init()
worker = subprocess.run([sys.executable, __file__, "as a worker"], timeout=100)
say(f"the worker ended with {worker.returncode}")
say(f"sum {float(mpistrat.allreduce(np.ones(1), op=mpistrat.Sum)[0])}")
