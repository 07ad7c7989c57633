"""Rank 1 is killed, and the others wait for it in collectives."""

import os
import signal

import numpy as np

import mpistrat

mpistrat.init()
mpistrat.allreduce(np.ones(100))
if mpistrat.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    mpistrat.allreduce(np.ones(100))
