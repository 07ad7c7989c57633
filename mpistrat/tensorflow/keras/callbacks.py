"""The names of mpistrat.keras.callbacks under Horovod's: `from mpistrat.tensorflow.keras.callbacks import ...`."""

from ...keras.callbacks import *  # noqa: F403
from ...keras.callbacks import __all__  # noqa: F401
