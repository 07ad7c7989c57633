"""The names of mpistrat.keras.callbacks under Horovod's: `from mpistrat.tensorflow.keras.callbacks import ...`."""

from ...api import missing_names
from ...keras.callbacks import *  # noqa: F403
from ...keras.callbacks import __all__ as __all__

__getattr__ = missing_names.explain(__name__)
