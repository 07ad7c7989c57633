"""The names of mpistrat.keras under Horovod's module name: `import mpistrat.tensorflow.keras as hvd`."""

from ...api import missing_names
from ...keras import *  # noqa: F403
from ...keras import __all__, callbacks, elastic  # noqa: F401

__getattr__ = missing_names.explain(__name__, missing_names.KERAS)
