import numpy as np

import mpistrat

mpistrat.init()
weights, loss = np.ones(3), np.ones(1)
if mpistrat.rank() == 0:
    weights = mpistrat.broadcast(weights, 0, name="weights")
loss = mpistrat.allreduce(loss, name="loss")
