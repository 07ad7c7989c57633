"""Checked all-reduces of several sizes, again and again; says which backend is used and by how much memory grows.

usage: many_allreduces.py TIMES
"""

import resource
import sys

import numpy as np
from reporting import say

import mpistrat
from mpistrat.api import runtime

times = int(sys.argv[1])
mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
SIZES = [1, 1000, 30_000, 300_000]
arrays = [np.full(elements, rank + 1, np.float32) for elements in SIZES]


def once() -> None:
    """All sizes, each alone and all together."""
    for i, array in enumerate(arrays):
        assert (mpistrat.allreduce(array, name=f"single.{i}", op=mpistrat.Sum) == size * (size + 1) / 2).all()
    for result in mpistrat.grouped_allreduce(arrays, name="together"):
        assert (result == (size + 1) / 2).all()


for _ in range(100):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(times):
    once()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
say(f"{runtime.current().data_name} {'grows' if grown > 4096 else 'stays'}")
