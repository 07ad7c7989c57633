"""Python's garbage collector does not look at the objects of imported libraries in a job of several ranks.

TensorFlow and Keras make 380,000 objects that live until the process ends. A full collection looks at all of them in
0.2 s, and Python runs four or five when it ends: 0.9 s of processor time in which each rank, and so the job, lingers.
"""

import gc
import os

from .launch_env import launched_size


def freeze_libraries() -> None:
    """Leave all objects that exist now out of collections. Called at the end of an import, before the script's code."""
    if launched_size(os.environ)[0] != 1:
        gc.freeze()
