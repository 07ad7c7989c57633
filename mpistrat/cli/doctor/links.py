"""Measure the links between hosts over MPI: latency, bandwidth, and the offset of the clocks.

Every wait has a timeout, so a link that passes no messages is reported. Called on each rank (rank.py).
"""

import statistics
import time
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

WAIT_S = 8.0
_ROUND_TRIPS = 20
_REPEATS = 3  # The first message of a size is slow, because the memory of its buffers is touched for the first time.
_FIRST_BYTES, _MOST_BYTES = 1 << 16, 1 << 24
_LONG_ENOUGH_S = 0.05  # A message that takes at least this long shows the bandwidth.
_TAG = 7
# Up to this number of hosts, all pairs are measured; above, each host with the next and with the first.
_ALL_PAIRS = 8


class NoAnswerError(Exception):
    """The other rank has not answered within the time limit, WAIT_S or a multiple."""


@dataclass(frozen=True)
class Link:
    """What was measured between the first ranks of two hosts."""

    hosts: tuple[str, str]  # The names of the hosts.
    latency_s: float  # Half of the median round trip of a small message.
    bytes_per_s: float  # The bandwidth, measured with a large message.
    offset_s: float  # The clock of the second host minus the clock of the first.
    offset_error_s: float  # The greatest error of `offset_s`.


def pairs(hosts: int) -> list[tuple[int, int]]:
    """Return the pairs of host indices to measure, given the number of hosts."""
    if hosts <= _ALL_PAIRS:
        return list(combinations(range(hosts), 2))
    return sorted({(0, host) for host in range(1, hosts)} | {(host, host + 1) for host in range(hosts - 1)})


def first_ranks(host_of: list[str]) -> list[int]:
    """Return the lowest rank of each host, in ascending order."""
    return sorted({host: rank for rank, host in reversed(list(enumerate(host_of)))}.values())


def wait(request: "MPI.Request", limit_s: float = WAIT_S, nap_s: float = 0.0) -> None:
    """Wait for a request. Raises NoAnswerError. `nap_s`: Sleep between polls; frees the core, but blurs the time."""
    until = time.monotonic() + limit_s
    while not request.Test():
        if time.monotonic() > until:
            raise NoAnswerError
        time.sleep(nap_s)


def hosts_of(comm: "MPI.Comm", host: str) -> list[str]:
    """Return the host of each rank. Collective. Raises NoAnswerError."""
    own = np.zeros(256, np.uint8)
    name = host.encode()[:own.size]
    own[:len(name)] = np.frombuffer(name, np.uint8)
    found = np.empty((comm.Get_size(), own.size), np.uint8)
    wait(comm.Iallgather(own, found), nap_s=0.001)
    return [row.tobytes().rstrip(b"\0").decode() for row in found]


def measure(comm: "MPI.Comm", hosts: tuple[str, str], ranks: tuple[int, int]) -> Link | None:
    """Measure the link between two ranks. Both ranks call this; the second gets None. Raises NoAnswerError."""
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
    """Return the seconds that a message of `size` bytes takes, without the small messages around it."""
    data, clock, began = np.zeros(size, np.uint8), np.zeros(1), time.perf_counter()
    _exchange(comm, other, np.array([float(size)]), clock)
    wait(comm.Isend(data, other, _TAG))
    wait(comm.Irecv(clock, other, _TAG))
    return max(time.perf_counter() - began - 2 * round_trip_s, 1e-9)


def _exchange(comm: "MPI.Comm", other: int, sent: np.ndarray, received: np.ndarray) -> None:
    wait(comm.Isend(sent, other, _TAG))
    wait(comm.Irecv(received, other, _TAG))


def _answer(comm: "MPI.Comm", other: int) -> None:
    """Answer each message with this host's clock, until -1 arrives. A number above 0 is the next message's size."""
    size = np.zeros(1)
    while True:
        wait(comm.Irecv(size, other, _TAG))
        if size[0] < 0:
            return
        wait(comm.Isend(np.array([time.time()]), other, _TAG))
        if size[0] > 0:
            wait(comm.Irecv(np.empty(int(size[0]), np.uint8), other, _TAG))
            wait(comm.Isend(np.array([time.time()]), other, _TAG))
