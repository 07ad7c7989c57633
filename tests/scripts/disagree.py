"""The ranks disagree about a shape, and nobody catches the error."""

import numpy as np

import mpistrat

mpistrat.init()
mpistrat.allreduce(np.zeros(1 + mpistrat.rank()), name="odd")
