"""The names of mpistrat.keras under Horovod's module name: `import mpistrat.tensorflow.keras as hvd`."""

from ...keras import *  # noqa: F403
from ...keras import __all__, callbacks  # noqa: F401
