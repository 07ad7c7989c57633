"""Steps of four ranks on two pretended hosts, in which rank 1 fails.

    mpistrat run -np 4 python tests/scripts/failing_steps.py HOW

HOW: raised, killed, slept (the others wait for it until the stall limit), or none.
"""

import os
import signal
import sys
import time

import numpy as np

import mpistrat
from tests.support.pretended_hosts import pretend_hosts

how, = sys.argv[1:]
pretend_hosts(2)
mpistrat.init()
for step in range(30):
    if step == 20 and mpistrat.rank() == 1:
        if how == "raised":
            raise ValueError("bad row 17")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slept":
            time.sleep(60)
    mpistrat.allreduce(np.ones(1000, np.float32), name=f"gradient/{step % 5}")
