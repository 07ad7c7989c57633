"""How far the monotonic clock of each rank is from that of rank 0.

Ranks on one kernel read one clock, CLOCK_MONOTONIC, and their offset is 0. A time namespace may shift it, so a clock is
identified by the kernel's boot and by the namespace. Between other ranks messages go back and forth: in init() over
MPI, and later with the messages of the trace, because clocks drift.
"""

import os
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUNDS = 30  # Of messages in init(). The shortest one counts: about 50 us between two hosts, so 2 ms.
_KEPT = 64  # later measurements
# Two clocks that nobody disciplines drift apart by at most so much.
_DRIFT = 50e-6


def identity() -> str:
    """What is equal for processes that read the same clock; "" if that is not known, as without Linux's /proc."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return ""


def measure(comm: "MPI.Intracomm") -> dict[int, "Offset"]:
    """How far the clock of each rank of `comm` is from that of its rank 0. Collective; the same on all ranks."""
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
    """The nanoseconds that a message to rank 0 and back takes, and the offset that it shows."""
    sent = time.monotonic_ns()
    comm.send(None, dest=0)
    there = comm.recv(source=0)
    received = time.monotonic_ns()
    return received - sent, (sent + received) // 2 - there


class Offset:
    """The offset of one rank's clock, as rank 0 knows it.

    Args:
        measured: In init(), in nanoseconds. 0 on rank 0's own clock.
        now: When, on the clock of rank 0.
        is_shared: The rank reads the same clock as rank 0.
    """

    def __init__(self, measured: int, now: int, is_shared: bool):
        self._is_shared = is_shared
        # (nanoseconds that the messages took, offset, when)
        self._rounds: deque[tuple[int, int, int]] = deque([(0, measured, now)], maxlen=_KEPT)

    def add(self, sent: int, received: int, answered: int, returned: int) -> None:
        """A message to the rank and its answer: `sent` and `returned` on this clock, the others on that of the rank."""
        if not self._is_shared:
            took = (returned - sent) - (answered - received)
            self._rounds.append((took, (received + answered - sent - returned) // 2, returned))

    def at(self, now: int) -> int:
        """The offset in nanoseconds. An older measurement is worse by the drift since then."""
        if self._is_shared:
            return 0
        rounds = self._rounds.copy()  # The engine's thread adds to them.
        return min(rounds, key=lambda each: each[0] / 2 + (now - each[2]) * _DRIFT)[1]
