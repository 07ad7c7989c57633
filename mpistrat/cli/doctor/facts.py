"""Collect facts about the host of a process, before it loads MPI, for `judge`. Reads Linux's /proc and /sys.

Called on each rank (rank.py), and by doctor_command.py for this machine.
"""

import os
import platform
import queue
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...api.runtime import versions
from ...process.cores import own_cpus, physical_cores

SHARED_MEMORY = "/dev/shm"
RESOLVE_LIMIT_S = 3.0
_UNLIMITED = 1 << 60  # Cgroups of version 1 write a number near 2**63 for no limit.


@dataclass(frozen=True)
class Facts:
    """The facts of one process. Sizes are in bytes, times in seconds."""

    rank: int = 0  # The rank that the launcher assigned; 0 without a launcher.
    host: str = ""
    # Versions of Python and of packages, by name; "none" for a package that is not installed.
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = 0  # The physical cores of the CPUs that the process may use; 0 if the system does not say.
    quota: float | None = None  # Number of CPUs that the container may use at a time; None: no limit.
    load: float = 0.0  # Load average of the host over five minutes.
    memory: int = 0  # Bytes that processes on this host may still allocate.
    swapped: float = 0.0  # The share of the swap that is in use; 0 without swap.
    shm: int | None = None  # Free bytes of /dev/shm; None: /dev/shm does not exist, or cannot be written.
    files: int | None = None  # How many more files and sockets the process may open; None: no limit.
    locked: int | None = None  # Bytes of memory that the process may lock; None: no limit.
    has_infiniband: bool = False  # Whether the host has InfiniBand, which needs locked memory.
    # Free bytes of each directory; None if the directory cannot be written.
    disks: dict[str, int | None] = field(default_factory=dict)
    resolve_s: float = 0.0  # Seconds in which the host resolved its own name.
    resolve_problem: str = ""  # Why the host did not resolve its own name; "" if it did.

    @classmethod
    def of(cls, received: dict[str, Any]) -> "Facts":
        """Return the Facts in `received`, which another version may have sent. Unknown fields are dropped."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in received.items() if name in known})


def collect(rank: int = 0) -> Facts:
    """Return the facts of this process. Takes some milliseconds; RESOLVE_LIMIT_S at most with a slow name server."""
    host = platform.node()
    quota, memory_left = limits_of_cgroups()
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    available = meminfo.get("MemAvailable", 0)
    swap = meminfo.get("SwapTotal", 0)
    opened = len(os.listdir("/proc/self/fd"))
    most_files, most_locked = (_limit(which) for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    resolve_s, resolve_problem = resolving(host)
    return Facts(
        rank=rank, host=host, versions=versions(), cores=len(physical_cores(own_cpus())), quota=quota,
        load=os.getloadavg()[1], memory=available if memory_left is None else min(available, memory_left),
        swapped=1 - meminfo.get("SwapFree", 0) / swap if swap else 0.0, shm=free_bytes(SHARED_MEMORY),
        files=None if most_files is None else most_files - opened, locked=most_locked,
        has_infiniband=os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        disks={path: free_bytes(path) for path in (tempfile.gettempdir(), os.path.expanduser("~"))},
        resolve_s=resolve_s, resolve_problem=resolve_problem)


def free_bytes(path: str) -> int | None:
    """Return the bytes that this user may still write to the file system of a directory; None if not writable."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if os.access(path, os.W_OK | os.X_OK) else None


def limits_of_cgroups(root: Path = Path("/sys/fs/cgroup"),
                      own: Path = Path("/proc/self/cgroup")) -> tuple[float | None, int | None]:
    """Return what the cgroups of this process still allow: (CPUs at a time, bytes of memory). None: no limit."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None, None
    quotas, memories = [], []
    for _, controllers, path in lines:
        for place in _upwards(path):
            if not controllers:
                quotas.append(_numbers(root / place / "cpu.max"))
                memories.append(_numbers(root / place / "memory.max") + _numbers(root / place / "memory.current"))
            elif "cpu" in controllers.split(","):
                directory = root / "cpu" / place
                quotas.append(_numbers(directory / "cpu.cfs_quota_us") + _numbers(directory / "cpu.cfs_period_us"))
            elif controllers == "memory":
                directory = root / "memory" / place
                memories.append(_numbers(directory / "memory.limit_in_bytes")
                                + _numbers(directory / "memory.usage_in_bytes"))
    cpus = [quota / period for quota, period in _pairs(quotas) if quota > 0]
    left = [most - used for most, used in _pairs(memories) if most < _UNLIMITED]
    return min(cpus, default=None), min(left, default=None)


def _upwards(path: str) -> list[str]:
    """Return the path of a cgroup and of all its parents. A container may see its own cgroup as the root."""
    parts = [part for part in path.split("/") if part and part != ".."]
    return ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]


def _pairs(found: Sequence[list[int]]) -> list[tuple[int, int]]:
    return [(each[0], each[1]) for each in found if len(each) == 2]


def _numbers(path: Path) -> list[int]:
    """Return the numbers in a file; [] if the file does not exist, or contains "max" (no limit)."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def resolving(name: str, limit_s: float = RESOLVE_LIMIT_S) -> tuple[float, str]:
    """Return the seconds in which this host resolves a name, and the error message, or ""."""
    answers: queue.Queue[str] = queue.Queue()

    def resolve() -> None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            answers.put(str(error.strerror or error))
        else:
            answers.put("")

    began = time.monotonic()
    threading.Thread(target=resolve, daemon=True).start()  # The system call has no timeout.
    try:
        problem = answers.get(timeout=limit_s)
    except queue.Empty:
        problem = f"no answer within {limit_s:g} s"
    return time.monotonic() - began, problem


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft
