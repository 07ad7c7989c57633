"""Every rank makes steps, the last one fewer than the others, and says what comes of it."""

import numpy as np
from reporting import attempt, say

import mpistrat

mpistrat.init()
last = mpistrat.rank() == mpistrat.size() - 1
for _ in range(3 if last else 4):
    attempt(lambda: float(mpistrat.allreduce(np.float64(1), name="loss", op=mpistrat.Sum)))
if not last:
    # The engine has ended, and goes on to say why.
    attempt(lambda: mpistrat.allreduce(np.float64(1), name="another"))
say("ends")
