"""Waits for MPI that have an end. MPI itself has none, so its requests are tested until they are complete or late."""

import ctypes
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from ...core.errors import StallError
from ...core.stalls import describe_wait
from ...core.topology import Topology

# Small exchanges are complete after so many looks, 0.5 us each: a rank that gives way at once gets its processor back
# late where others compute (1 KB on 2 ranks beside two busy processes: 32 us, and 2.4 with these).
_SPINS = 50
# How long a rank stays awake: what a small exchange takes, and what more bytes take on a network that is quick enough
# for a sleep to cost anything. Then it sleeps in between, for its processor may be what another rank waits for; longer
# the longer it has waited, which makes no wait much longer than it must be.
_AWAKE_S = 2e-3
_AWAKE_BYTES_PER_S = 1e9
_PAUSES = 64
_SHORTEST_S = 50e-6
_LONGEST_S = 1e-3


class PeerWait:
    """How one rank waits for others, over one communicator. Used by the engine's thread.

    Args:
        topology: Where the ranks are.
        peers: The ranks that it may wait for.
        limit_s: How long a wait may take; 0: for ever.
    """

    def __init__(self, topology: Topology, peers: Sequence[int], limit_s: float):
        self._topology, self._limit_s = topology, limit_s
        self._peers = [peer for peer in peers if peer != topology.rank]

    def complete(self, requests: Sequence[MPI.Request], nbytes: int = 0) -> None:
        """Return when the requests, of `nbytes` in all, are complete. Python's lock is free meanwhile.

        Raises:
            StallError: They are not, after the limit. MPI may still use their memory, which is never freed then.
        """
        test = MPI.Request.Testall
        for _ in range(_SPINS):
            if test(requests):
                return
        try:
            self.until(lambda: test(requests), nbytes=nbytes)
        except StallError:
            never_free(requests)
            raise

    def until(self, is_done: Callable[[], bool], missing: Callable[[], Sequence[int]] | None = None,
              nbytes: int = 0, limit_s: float | None = None) -> None:
        """Return when `is_done()`, which is asked again and again.

        Args:
            is_done: What is waited for.
            missing: The ranks that it depends on, asked once it is late; all peers by default.
            nbytes: How much is to be transferred until then.
            limit_s: In place of that of all waits.

        Raises:
            StallError: It is not, after the limit; names those ranks, their hosts and the likely causes.
        """
        began, awake_s = time.monotonic(), _AWAKE_S + nbytes / _AWAKE_BYTES_PER_S
        limit_s = self._limit_s if limit_s is None else limit_s
        while not is_done():
            waited_s = time.monotonic() - began
            if 0 < limit_s < waited_s:
                raise StallError(describe_wait(self._topology, missing() if missing else self._peers, waited_s))
            if waited_s < awake_s:
                os.sched_yield()
            else:
                time.sleep(min(max(waited_s / _PAUSES, _SHORTEST_S), _LONGEST_S))


def peer_wait_without_end() -> PeerWait:
    """For ranks of which it does not matter where they are."""
    return PeerWait(Topology(0, ("",)), (), 0.0)


def never_free(thing: Any) -> None:
    """Keep what MPI may still write to, be it in MPI_Finalize, when Python has ended: it cannot be told to give up."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
