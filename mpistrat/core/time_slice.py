"""The time slice of a thread that moves data among threads that compute.

From Linux 6.12 on, a thread may ask for its slice (sched(7), EEVDF). With a short one it gets a processor soon after it
wakes, and has it for as large a share of the time as before. That needs no privileges.
"""

import ctypes
import os
import platform
import struct

from .tuning import ENGINE_TIME_SLICE_NS

# The number of sched_setattr, for which glibc has a function from 2.41 on only.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def shorten_time_slice() -> bool:
    """Ask for a short time slice for the calling thread. Returns whether the kernel has taken it; an older one has too.

    A thread of another policy than that of the system's default keeps what it has.
    """
    number = _SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    attributes = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, os.getpriority(os.PRIO_PROCESS, 0), 0,
                                  ENGINE_TIME_SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
