"""The names of mpistrat.keras.callbacks under Horovod's: `from mpistrat.tensorflow.keras.callbacks import ...`."""

from ...api import absent
from ...keras.callbacks import *  # noqa: F403
from ...keras.callbacks import __all__ as __all__

__getattr__ = absent.explain(__name__)
