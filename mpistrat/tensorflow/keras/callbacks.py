"""The names of mpistrat.keras.callbacks under Horovod's module name, mpistrat.tensorflow.keras.callbacks."""

from ...api import missing_names
from ...keras.callbacks import *  # noqa: F403
from ...keras.callbacks import __all__ as __all__

__getattr__ = missing_names.explain(__name__)
