"""Excludes the objects of imported libraries from garbage collection in a job of several ranks.

TensorFlow and Keras make 380,000 objects that live until the process ends. A full collection visits all these objects
in 0.2 s, and Python runs four or five collections when it ends: 0.9 s by which each rank, and so the job, ends later.
"""

import gc
import os

from .launch_env import launched_size


def freeze_libraries() -> None:
    """Exclude all existing objects from garbage collection. Called at the end of an import, before the script."""
    if launched_size(os.environ)[0] != 1:
        gc.freeze()
