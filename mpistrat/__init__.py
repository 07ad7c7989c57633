"""mpistrat: data-parallel training over MPI. This module has the collectives on arrays, without a framework.

    import numpy, mpistrat
    mpistrat.init()
    print(mpistrat.allreduce(numpy.arange(3.0), op=mpistrat.Sum))

`import mpistrat` loads neither TensorFlow nor an MPI library. `mpistrat.tensorflow` and `mpistrat.keras` build on it.
"""

import os
import signal
import sys

if sys.argv[1:2] == ["run"] and "mpistrat" in (os.path.basename(sys.argv[0]), *sys.orig_argv[2:3]):
    # `mpistrat run` ends with the exit code of a signal from its first moment on. Without these handlers, Ctrl-C in the
    # imports below would be an error of an import.
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os._exit(128 + number))

from . import horovod
from .api import array_ops, common, missing_names
from .api.array_ops import *  # noqa: F403
from .api.common import *  # noqa: F403
from .core import errors
from .core.errors import *  # noqa: F403
from .core.request import ReduceOp
from .core.roles import Role
from .core.version import __version__ as __version__
from .horovod import run

__all__ = ["ReduceOp", "Role", "run"]
__all__ += array_ops.__all__
__all__ += common.__all__
__all__ += errors.__all__

__getattr__ = missing_names.explain(__name__, missing_names.ARRAYS)
horovod.install()
