"""The same as mpistrat.keras, where a Horovod script looks for it: `import mpistrat.tensorflow.keras as hvd`."""

from ...keras import *  # noqa: F403
from ...keras import __all__, callbacks  # noqa: F401
