"""Whether Linux gives the system calls of a process' threads, which the detection of deadlocks needs."""

import platform
from pathlib import Path

import pytest


def _are_given() -> bool:
    try:
        Path("/proc/self/syscall").read_text()
    except OSError:
        return False
    return platform.machine() in ("x86_64", "aarch64")


needs_system_calls = pytest.mark.skipif(not _are_given(), reason="Linux does not give the system calls of threads here")
