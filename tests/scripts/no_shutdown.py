"""Train a little and end without shutdown(), with an operation that is not waited for."""

import numpy as np
from reporting import say

import mpistrat

mpistrat.init()
for step in range(3):
    mpistrat.allreduce(np.ones(100), name=f"gradient.{step}")
pending = mpistrat.allreduce_async(np.ones(100))
say("ends")
