"""Has Linux send this process SIGTERM when its parent process ends. Used by processes of the launcher."""

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def parent_guard(parent: int) -> Callable[[], bool]:
    """Return a function that requests the signal in the process that calls it.

    The C library is loaded here, so that the function may be called between fork and exec.

    Args:
        parent: The number of the parent process.

    Returns:
        The function. It returns False if the parent has ended before the request took effect: no signal comes then.
    """
    set_option = ctypes.CDLL(None).prctl

    def guard() -> bool:
        set_option(_PR_SET_PDEATHSIG, signal.SIGTERM)
        return os.getppid() == parent

    return guard
