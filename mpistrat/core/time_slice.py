"""The time slice of a thread that moves data among threads that compute, from Linux 6.12 on (sched(7), EEVDF).

With a short slice it gets a processor soon after it wakes, for as large a share of the time. That needs no privileges.
"""

import ctypes
import os
import platform
import struct

from .tuning import ENGINE_TIME_SLICE_NS

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # The number of the call, which glibc has from 2.41 on.


def shorten_time_slice() -> None:
    """Ask for a short time slice for the calling thread, if it has the default policy. An older kernel ignores it."""
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() == "Linux" and number and os.sched_getscheduler(0) == os.SCHED_OTHER:
        # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
        ctypes.CDLL(None).syscall(number, 0, struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, os.getpriority(
            os.PRIO_PROCESS, 0), 0, ENGINE_TIME_SLICE_NS, 0, 0), 0)
