"""Reduce an array of so many bytes (the first argument) so many times (the second)."""

import sys

import numpy as np

import mpistrat

bytes_each, times = map(int, sys.argv[1:])
mpistrat.init()
array = np.ones(bytes_each // 4, np.float32)
for _ in range(times):
    result = mpistrat.allreduce(array, op=mpistrat.Sum)
    assert result[0] == result[-1] == mpistrat.size()
