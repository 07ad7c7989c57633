"""Waits for MPI requests with a time limit, which MPI itself does not have.

A wait tests the requests repeatedly: first in a tight loop, then with sched_yield, then with sleeps in between, since
another rank may need the processor. core.tuning has the times (MPI_*). Used by the engine's thread.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI

from ...core.errors import StallError
from ...core.interruption import Interruption
from ...core.topology import Topology, describe_wait
from ...core.tuning import (
    MPI_LONGEST_SLEEP_S,
    MPI_SHORTEST_SLEEP_S,
    MPI_SLEEP_DIVISOR,
    MPI_SPIN_TESTS,
    MPI_YIELD_BYTES_PER_S,
    MPI_YIELD_S,
)


class PeerWait:
    """Waits of one rank for others.

    Args:
        peers: The ranks that this rank may wait for.
        limit_s: Seconds after which a wait fails; 0: never.
        interruption: Interrupts waits; None: waits cannot be interrupted.
    """

    def __init__(self, topology: Topology, peers: Sequence[int], limit_s: float,
                 interruption: Interruption | None = None):
        self._topology, self._limit_s, self._interruption = topology, limit_s, interruption or Interruption()
        # The requests of waits that have ended in an error. MPI may use their memory.
        self.unfinished: list[MPI.Request] = []
        self._peers = [peer for peer in peers if peer != topology.rank]

    def complete(self, requests: Sequence[MPI.Request], nbytes: int = 0, others: Sequence[int] | None = None) -> None:
        """Return when the requests are complete. Releases the GIL meanwhile.

        Args:
            requests: The MPI requests, which are tested together.
            nbytes: The bytes that all requests transfer.
            others: The ranks that the requests depend on, for the error. Default: all peers.

        Raises:
            StallError: The requests are not complete after the limit. Their memory is never freed, as MPI may use it.
            RanksLostError: The wait is interrupted.
        """
        test = MPI.Request.Testall
        try:
            for _ in range(MPI_SPIN_TESTS):
                if test(requests):
                    return
            self.until(lambda: test(requests), None if others is None else lambda: others, nbytes)
        except Exception as error:
            self.unfinished += requests
            if isinstance(error, StallError):
                never_free(requests)
            raise

    def until(self, is_done: Callable[[], bool], missing: Callable[[], Sequence[int]] | None = None,
              nbytes: int = 0, limit_s: float | None = None) -> None:
        """Call `is_done` until it returns true.

        Args:
            is_done: Returns whether the wait is over.
            missing: Returns the ranks that the wait depends on, for the error. Default: all peers.
            nbytes: The bytes to transfer during the wait. More bytes delay the first sleep.
            limit_s: Replaces the limit of this object.

        Raises:
            StallError: `is_done` is false after the limit. The text names the ranks, hosts and likely causes.
            RanksLostError: The wait is interrupted.
        """
        began, yield_s = time.monotonic(), MPI_YIELD_S + nbytes / MPI_YIELD_BYTES_PER_S
        limit_s = self._limit_s if limit_s is None else limit_s
        while not is_done():
            waited_s = time.monotonic() - began
            self._interruption.check()
            if 0 < limit_s < waited_s:
                raise StallError(describe_wait(self._topology, missing() if missing else self._peers, waited_s))
            if waited_s < yield_s:
                os.sched_yield()
            else:
                time.sleep(min(max(waited_s / MPI_SLEEP_DIVISOR, MPI_SHORTEST_SLEEP_S), MPI_LONGEST_SLEEP_S))


def never_free(thing: object) -> None:
    """Keep `thing` alive for ever: MPI cannot abandon a request, and may write to its memory even in MPI_Finalize."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
