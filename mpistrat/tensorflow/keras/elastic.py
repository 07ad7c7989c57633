"""The names of mpistrat.keras.elastic under Horovod's module name, mpistrat.tensorflow.keras.elastic."""

from ...api import missing_names
from ...keras.elastic import *  # noqa: F403
from ...keras.elastic import __all__ as __all__

__getattr__ = missing_names.explain(__name__)
