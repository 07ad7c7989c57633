"""Call init and one collective, and say what comes of it. An argument R:NAME=VALUE sets a variable on rank R only."""

import os
import sys

import numpy as np
from reporting import attempt, launched_rank

import mpistrat

for argument in sys.argv[1:]:
    rank, _, assignment = argument.partition(":")
    if int(rank) == launched_rank():
        name, _, value = assignment.partition("=")
        os.environ[name] = value


def init_and_sum() -> float:
    mpistrat.init()
    return float(mpistrat.allreduce(np.float64(1), op=mpistrat.Sum))


attempt(init_and_sum)
