"""Operations before init, between init and shutdown, and after shutdown, in a first and in a second life."""

import numpy as np
from reporting import attempt, say

import mpistrat


def total() -> float:
    return float(mpistrat.allreduce(np.float64(mpistrat.rank() + 1), op=mpistrat.Sum))


say("before init")
attempt(total)
attempt(mpistrat.rank)
attempt(mpistrat.shutdown)
say("after init")
mpistrat.init()
attempt(total)
say("after a second init")
pending = mpistrat.allreduce_async(np.ones(3), op=mpistrat.Sum)
mpistrat.init()
attempt(lambda: float(pending.wait().sum()))
attempt(total)
say("after shutdown")
mpistrat.shutdown()
attempt(total)
attempt(mpistrat.size)
attempt(mpistrat.is_initialized)
say("after shutdown and init")
mpistrat.init()
attempt(total)
attempt(mpistrat.is_initialized)
say("ends")
