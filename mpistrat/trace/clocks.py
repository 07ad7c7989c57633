"""The offset of each rank's clock, CLOCK_MONOTONIC, from the clock of rank 0.

Ranks on one kernel and in one time namespace read the same clock. If that is the clock of rank 0, their offset is 0.
All other offsets are measured by the times of messages to rank 0 and back: in init() over MPI, and repeatedly with the
messages of the tracer, because clocks drift.
"""

import os
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUNDS = 30  # Of messages in init(). The shortest one counts: about 50 us between two hosts, so 2 ms.
_KEPT = 64  # later measurements
# The largest drift, in seconds per second, between two clocks that are not synchronised.
_DRIFT = 50e-6


def identity() -> str:
    """Return a text that is equal for processes that read the same clock; "" if unknown (without Linux's /proc)."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def measure(comm: "MPI.Intracomm") -> dict[int, "Offset"]:
    """Return the offset of each rank's clock from the clock of rank 0 of `comm`. Collective; the same on all ranks."""
    identities = comm.allgather(identity())
    rank = comm.Get_rank()
    # The first rank that reads a clock measures it.
    first = {each: other for other, each in reversed(list(enumerate(identities))) if each}
    offset = 0
    for other, each in enumerate(identities):
        if other == 0 or (each and (first[each] != other or each == identities[0])):
            continue
        if rank == 0:
            for _ in range(_ROUNDS):
                comm.recv(source=other)
                comm.send(time.monotonic_ns(), dest=other)
        elif rank == other:
            rounds = [_round(comm) for _ in range(_ROUNDS)]
            offset = min(rounds)[1]
    offsets, now = comm.allgather(offset), time.monotonic_ns()
    return {other: Offset(offsets[first[each] if each else other], now, bool(other == 0 or each == identities[0] != ""))
            for other, each in enumerate(identities)}


def _round(comm: "MPI.Intracomm") -> tuple[int, int]:
    """Send a message to rank 0 and back. Return the nanoseconds that this takes, and the clock offset that it shows."""
    sent = time.monotonic_ns()
    comm.send(None, dest=0)
    there = comm.recv(source=0)
    received = time.monotonic_ns()
    return received - sent, (sent + received) // 2 - there


class Offset:
    """The offset of one rank's clock from the clock of rank 0, as known on rank 0.

    `measured`: The offset in nanoseconds, measured in init(). `now`: The time of the measurement, by the clock of rank
    0. `is_shared`: Whether the rank reads the same clock as rank 0.
    """

    def __init__(self, measured: int, now: int, is_shared: bool):
        self._is_shared = is_shared
        # (nanoseconds that the messages took, offset, when)
        self._rounds: deque[tuple[int, int, int]] = deque([(0, measured, now)], maxlen=_KEPT)

    def add(self, sent: int, received: int, answered: int, returned: int) -> None:
        """Add a round trip of messages. Rank 0 measured `sent` and `returned`. The rank measured the other times."""
        if not self._is_shared:
            took = (returned - sent) - (answered - received)
            self._rounds.append((took, (received + answered - sent - returned) // 2, returned))

    def at(self, now: int) -> int:
        """Return the offset in ns at the time `now`, by the most exact measurement. Old measurements are less exact."""
        if self._is_shared:
            return 0
        rounds = self._rounds.copy()  # The engine's thread adds to them.
        return min(rounds, key=lambda each: each[0] / 2 + (now - each[2]) * _DRIFT)[1]
