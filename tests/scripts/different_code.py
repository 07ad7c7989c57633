"""Rank 1 runs another script and another TensorFlow than the other ranks, as far as init can see."""

import sys

import numpy as np
from reporting import attempt, launched_rank, say, say_log

import mpistrat
from mpistrat.api import runtime

say_log()
if launched_rank() == 1:
    versions = {**runtime.versions(), "tensorflow": "2.99.9"}
    runtime.versions = lambda: versions
    sys.argv[0] = runtime.__file__
mpistrat.init()
attempt(lambda: float(mpistrat.allreduce(np.float64(1), op=mpistrat.Sum)))
say("ends")
