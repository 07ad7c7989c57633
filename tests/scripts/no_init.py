"""A cluster resolver that is made before init()."""

from reporting import attempt

import mpistrat.tensorflow as hvd

attempt(hvd.MPIClusterResolver)
