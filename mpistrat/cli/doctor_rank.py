"""One rank of `mpistrat doctor`: `mpirun -np 2 python -m mpistrat.cli.doctor_rank 2`.

The rank prints each result as a line of JSON, as soon as the result is known. The facts about its host come first,
before the rank loads MPI. So these facts are printed even if MPI ends the rank, or if no other rank can be reached.
Then the ranks measure the links between hosts: latency, bandwidth, and the offset of the clocks. Every wait has a
timeout, so a link that passes no messages is reported. At the end the ranks run all-reduces.

Started by doctor.py with mpirun. doctor.py also calls `collect`, to examine this machine.
"""

import os
import platform
import resource
import socket
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..api import array_ops, common, runtime
from ..core.errors import MpistratError
from ..process.cores import own_cpus, physical_cores
from ..process.launch_env import launched_rank
from .child import say

if TYPE_CHECKING:
    from mpi4py import MPI

# -- facts about the host: Linux's /proc and /sys ---------------------------------------------------------------------

_RESOLVE_LIMIT_S = 3.0
_UNLIMITED = 1 << 60  # Cgroups of version 1 write a number near 2**63 for no limit.


@dataclass(frozen=True)
class Facts:
    """The facts about one rank and its host. Sizes are in bytes, times in seconds."""

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
        """Return the Facts in `received`. Unknown fields are dropped: a different version may have sent them."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in received.items() if name in known})


def collect(rank: int = 0) -> Facts:
    """Return the facts about this process. Takes milliseconds, or up to _RESOLVE_LIMIT_S if the name server is slow."""
    host = platform.node()
    quota, memory_left = limits_of_cgroups()
    lines = Path("/proc/meminfo").read_text().splitlines()
    meminfo = {name: 1024 * int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    available = meminfo.get("MemAvailable", 0)
    swap = meminfo.get("SwapTotal", 0)
    opened = len(os.listdir("/proc/self/fd"))
    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    most_files, most_locked = (None if soft == resource.RLIM_INFINITY else soft for soft in limits)
    resolve_s, resolve_problem = resolving(host)
    return Facts(
        rank=rank, host=host, versions=runtime.versions(), cores=len(physical_cores(own_cpus())), quota=quota,
        load=os.getloadavg()[1], memory=available if memory_left is None else min(available, memory_left),
        swapped=1 - meminfo.get("SwapFree", 0) / swap if swap else 0.0, shm=_free_bytes("/dev/shm"),
        files=None if most_files is None else most_files - opened, locked=most_locked,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        disks={path: _free_bytes(path) for path in (tempfile.gettempdir(), os.path.expanduser("~"))},
        resolve_s=resolve_s, resolve_problem=resolve_problem)


def _free_bytes(path: str) -> int | None:
    """Return the bytes that this user may write to the file system of a directory; None if it is not writable."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if os.access(path, os.W_OK | os.X_OK) else None


def limits_of_cgroups(root: Path = Path("/sys/fs/cgroup"),
                      own: Path = Path("/proc/self/cgroup")) -> tuple[float | None, int | None]:
    """Return the limits that cgroups set for this process: (CPUs at a time, free bytes of memory). None: no limit."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return None, None
    quotas: list[tuple[int, int]] = []
    memories: list[tuple[int, int]] = []
    for _, controllers, path in lines:
        parts = [part for part in path.split("/") if part and part != ".."]
        # The cgroup and all its parents. A container may see its own cgroup as the root.
        for place in ("/".join(parts[:n]) for n in range(len(parts), -1, -1)):
            if not controllers:
                quotas += _pair(root / place / "cpu.max")
                memories += _pair(root / place / "memory.max", root / place / "memory.current")
            elif "cpu" in controllers.split(","):
                directory = root / "cpu" / place
                quotas += _pair(directory / "cpu.cfs_quota_us", directory / "cpu.cfs_period_us")
            elif controllers == "memory":
                directory = root / "memory" / place
                memories += _pair(directory / "memory.limit_in_bytes", directory / "memory.usage_in_bytes")
    return (min((quota / period for quota, period in quotas if quota > 0), default=None),
            min((most - used for most, used in memories if most < _UNLIMITED), default=None))


def _pair(*files: Path) -> list[tuple[int, int]]:
    """Read two numbers from one file or from two. Return [(a, b)]; [] if a file is missing or has "max" (no limit)."""
    try:
        first, second = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):
        return []
    return [(first, second)]


def resolving(name: str, limit_s: float = _RESOLVE_LIMIT_S) -> tuple[float, str]:
    """Resolve the host name `name`. Return the seconds that it took, and the error message, or "" on success."""
    answers: list[str] = []

    def resolve() -> None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            answers.append(str(error.strerror or error))
        else:
            answers.append("")

    began = time.monotonic()
    thread = threading.Thread(target=resolve, daemon=True)  # The system call has no timeout.
    thread.start()
    thread.join(limit_s)
    return time.monotonic() - began, answers[0] if answers else f"no answer within {limit_s:g} s"


# -- links ------------------------------------------------------------------------------------------------------------

WAIT_S = 8.0
_ROUND_TRIPS = 20
_REPEATS = 3  # The first message of a size is slow, because the memory of its buffers is touched for the first time.
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 24
_LONG_ENOUGH_S = 0.05  # A message that takes at least this long shows the bandwidth.
_TAG = 7
# Up to this number of hosts, all pairs are measured; above, each host with the next and with the first.
_ALL_PAIRS = 8


class NoAnswerError(Exception):
    """Another rank has not answered within the time limit."""


@dataclass(frozen=True)
class Link:
    """The measured properties of the link between the first ranks of two hosts."""

    hosts: tuple[str, str]  # The names of the hosts.
    latency_s: float  # Half of the median round trip of a small message.
    bytes_per_s: float  # The bandwidth, measured with a large message.
    offset_s: float  # The clock of the second host minus the clock of the first.
    offset_error_s: float  # The greatest error of `offset_s`.


def pairs(hosts: int) -> list[tuple[int, int]]:
    """Return the pairs of hosts, as indices, whose links are measured. `hosts`: The number of hosts."""
    if hosts <= _ALL_PAIRS:
        return list(combinations(range(hosts), 2))
    return sorted({(0, host) for host in range(1, hosts)} | {(host, host + 1) for host in range(hosts - 1)})


def first_ranks(host_of: list[str]) -> list[int]:
    """Return the lowest rank of each host, in ascending order. `host_of`: The host of each rank."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(host_of)))}.values())


def wait(request: "MPI.Request", limit_s: float = WAIT_S, nap_s: float = 0.0) -> None:
    """Wait for an MPI request. Raises NoAnswerError after `limit_s`. `nap_s`: Sleep between polls, to free the core."""
    until = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > until:
            raise NoAnswerError
        time.sleep(nap_s)


def _hosts_of(comm: "MPI.Comm") -> list[str]:
    """Return the host of each rank. Collective. Raises NoAnswerError."""
    own = np.zeros(256, np.uint8)
    name = platform.node().encode()[:own.size]
    own[:len(name)] = np.frombuffer(name, np.uint8)
    found = np.empty((comm.Get_size(), own.size), np.uint8)
    wait(comm.Iallgather(own, found), nap_s=0.001)
    return [row.tobytes().rstrip(b"\0").decode() for row in found]


def measure(comm: "MPI.Comm", hosts: tuple[str, str], ranks: tuple[int, int]) -> Link | None:
    """Measure the link between two ranks. Both ranks call this; the second rank gets None. Raises NoAnswerError."""
    if comm.Get_rank() == ranks[1]:
        _answer(comm, ranks[0])
        return None
    other = ranks[1]
    offsets, round_trips = [], []
    clock = np.zeros(1)
    for _ in range(_ROUND_TRIPS):
        began, began_at = time.perf_counter(), time.time()
        _exchange(comm, other, np.zeros(1), clock)
        round_trips.append(time.perf_counter() - began)
        offsets.append(float(clock[0]) - began_at - round_trips[-1] / 2)
    fastest = min(round_trips)
    size = _FIRST_BYTES
    rates: list[float] = []
    while not rates or (size < _MOST_BYTES and size / rates[-1] < _LONG_ENOUGH_S):
        size = 4 * size if rates else size
        rates.append(size / min(_seconds_of(comm, other, size, fastest) for _ in range(_REPEATS)))
    wait(comm.Isend(np.array([-1.0]), other, _TAG))
    return Link(hosts, statistics.median(round_trips) / 2, rates[-1], offsets[round_trips.index(fastest)], fastest / 2)


def _seconds_of(comm: "MPI.Comm", other: int, size: int, round_trip_s: float) -> float:
    """Send `size` as a number, then as many bytes; await both replies. Return the seconds minus two round trips."""
    data, clock, began = np.zeros(size, np.uint8), np.zeros(1), time.perf_counter()
    _exchange(comm, other, np.array([float(size)]), clock)
    _exchange(comm, other, data, clock)
    return max(time.perf_counter() - began - 2 * round_trip_s, 1e-9)


def _exchange(comm: "MPI.Comm", other: int, sent: np.ndarray, received: np.ndarray) -> None:
    wait(comm.Isend(sent, other, _TAG))
    wait(comm.Irecv(received, other, _TAG))


def _answer(comm: "MPI.Comm", other: int) -> None:
    """Reply with the time to messages of `other`: 0, or a size and then as many bytes. Return when it sends -1."""
    size = np.zeros(1)
    while True:
        wait(comm.Irecv(size, other, _TAG))
        if size[0] < 0:
            return
        wait(comm.Isend(np.array([time.time()]), other, _TAG))
        if size[0] > 0:
            wait(comm.Irecv(np.empty(int(size[0]), np.uint8), other, _TAG))
            wait(comm.Isend(np.array([time.time()]), other, _TAG))


# -- the rank ---------------------------------------------------------------------------------------------------------

_COUNT = 1024  # float32 elements of the all-reduce
_ROUNDS, _WARM_UP_ROUNDS = 50, 5
_LARGE_BYTES, _LARGE_ROUNDS = 64 * 2**20, 12  # bytes of all ranks together
_FLUSH_S = 0.3  # mpirun may lose what a rank prints just before it ends the job.


def main(expected: int) -> int:
    """Print the facts of this rank. Return 0 if MPI sees `expected` ranks and all is right, else 1. Collective."""
    rank = launched_rank(os.environ)
    say("facts", **asdict(collect(rank)))
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    vendor, version = MPI.get_vendor()
    say("mpi", rank=rank, size=comm.Get_size(), vendor=vendor, version=".".join(map(str, version)),
        shared_memory=common.why_no_shared_memory())
    if comm.Get_size() != expected:
        return 1
    try:
        _measure_links(comm)
    except NoAnswerError:
        time.sleep(_FLUSH_S)
        comm.Abort(1)
    try:
        return _allreduce()
    except MpistratError as error:
        say("error", rank=rank, text=str(error))
        return 1


def _measure_links(comm: "MPI.Intracomm") -> None:
    """Measure the links between the hosts, one after the other. Collective.

    Raises NoAnswerError: Another rank does not answer. The ranks of a silent link print its hosts before they raise.
    """
    rank = comm.Get_rank()
    try:
        host_of = _hosts_of(comm)
    except NoAnswerError:
        say("silence", ranks=[], hosts=[])
        raise
    firsts = first_ranks(host_of)
    for one, other in pairs(len(firsts)):
        ranks = firsts[one], firsts[other]
        hosts = host_of[ranks[0]], host_of[ranks[1]]
        if rank in ranks:
            try:
                link = measure(comm, hosts, ranks)
            except NoAnswerError:
                say("silence", ranks=ranks, hosts=hosts)
                raise
            if link is not None:
                say("link", **asdict(link))
        wait(comm.Ibarrier(), limit_s=4 * WAIT_S, nap_s=0.001)


def _allreduce() -> int:
    """Check all-reduces of numbers whose sum is known. Return the exit code. Collective; rank 0 prints the result.

    Raises MpistratError: init() or an all-reduce has failed.
    """
    common.init()
    rank, size = common.rank(), common.size()
    array = np.arange(_COUNT, dtype=np.float32) + rank
    # All terms are small integers, so the sum is exact in float32.
    right = size * np.arange(_COUNT, dtype=np.float32) + size * (size - 1) / 2
    seconds = []
    is_right = True
    for _ in range(_WARM_UP_ROUNDS + _ROUNDS):
        began = time.perf_counter()
        result = array_ops.allreduce(array, op=common.Sum, name="doctor")
        seconds.append(time.perf_counter() - began)
        is_right = is_right and bool(np.array_equal(result, right))
    # Large arrays, after which the ranks have chosen the chunk size. With several hosts ranks choose nothing.
    large = np.ones(_LARGE_BYTES // size // 4, np.float32)
    for _ in range(_LARGE_ROUNDS if len(common.hosts()) == 1 else 0):
        is_right = is_right and bool((array_ops.allreduce(large, op=common.Sum, name="doctor.large") == size).all())
    is_right_everywhere = all(array_ops.allgather_object(is_right))
    if rank == 0:
        choices = runtime.group_of("doctor", 0).traced.choices()
        say("allreduce", right=is_right_everywhere, hosts=common.hosts(), bytes=array.nbytes,
            seconds=statistics.median(seconds[_WARM_UP_ROUNDS:]), choices=choices)
    is_right_on_gpus = _allreduce_on_gpus()
    common.shutdown()
    return 0 if is_right_everywhere and is_right_on_gpus else 1


def _allreduce_on_gpus() -> bool:
    """Return whether all-reduces on GPUs are right; True if a rank has no cupy or no GPU. Collective.

    Each rank prints its findings. There are three all-reduces, because mpistrat checks the first two on the CPU.
    """
    if not all(array_ops.allgather_object(common.gpu_available())):
        return True
    import cupy
    rank, size = common.rank(), common.size()
    with cupy.cuda.Device(common.local_rank() % cupy.cuda.runtime.getDeviceCount()):
        arrays = [cupy.arange(count, dtype=cupy.float32) + rank for count in (_COUNT, 3)]
        is_right = True
        for _ in range(3):
            results = array_ops.grouped_allreduce(arrays, op=common.Sum, name="doctor.gpu")
            is_right = is_right and all(bool((result == size * cupy.arange(len(result)) + size * (size - 1) / 2).all())
                                        for result in results)
    found = runtime.group_of("doctor", 0).engine.controller.executor.device.findings
    say("gpu", rank=rank, right=is_right, findings=list(found))
    return all(array_ops.allgather_object(is_right))


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
