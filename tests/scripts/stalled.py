"""Rank 1 never submits `lonely`. With the argument `for another` it waits for that meanwhile; else for nothing."""

import sys
import time

import numpy as np
from reporting import attempt, say, say_log

import mpistrat
from mpistrat.api import runtime

say_log()
mpistrat.init()
mpistrat.allreduce(np.ones(2), name="before")
if mpistrat.rank() != 1:
    attempt(lambda: mpistrat.allreduce(np.ones(2), name="lonely"))
elif sys.argv[1] == "for another":
    attempt(lambda: mpistrat.allreduce(np.ones(2), name="another"))
else:
    while runtime.current().engine.controller.life.error is None:
        time.sleep(0.01)
    attempt(lambda: mpistrat.allreduce(np.ones(2), name="late"))
say("ends")
