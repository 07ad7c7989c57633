"""Collectives for 8 s, to which rank 1 comes late.

    mpirun -np 2 python tests/scripts/late_rank.py
"""

import time

import numpy as np

import mpistrat

mpistrat.init()
for _ in range(400):
    time.sleep(0.02 if mpistrat.rank() == 1 else 0.002)
    mpistrat.allreduce(np.ones(10), name="x")
