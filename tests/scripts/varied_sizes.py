"""Checked all-reduces and allgathers of other sizes in each step; says what memory and descriptors they leave.

usage: varied_sizes.py TIMES
"""

import os
import sys
from pathlib import Path

import numpy as np
from reporting import descriptors, say

import mpistrat

times = int(sys.argv[1])
WARM_UP = 500
MOST_BYTES = 2**21
mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
random = np.random.default_rng(7)  # the same on all ranks
ones = np.ones(MOST_BYTES // 4, np.float32)


def elements() -> int:
    """From 1 to the most; each order of magnitude is as frequent."""
    return int(2 ** random.uniform(0, np.log2(ones.size)))


def once(number: int) -> None:
    if number % 2:
        array = ones[:elements()]
        result = mpistrat.allreduce(array, op=mpistrat.Sum, name="sum")
        assert result.shape == array.shape and (result == size).all()
    else:
        rows = [elements() // size for _ in range(size)]
        result = mpistrat.allgather(ones[:rows[rank]] * np.float32(rank), name="gather")
        assert (result == np.repeat(np.arange(size, dtype=np.float32), rows)).all()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


for number in range(WARM_UP):
    once(number)
memory, files = resident(), descriptors()
for number in range(times):
    once(number)
say(f"grown by {resident() - memory} bytes, other descriptors: {sorted(files ^ descriptors())}")
