"""MPI requests: exchanges of arrays, and waits with a time limit, which MPI itself does not have.

A wait tests the requests repeatedly: first in a tight loop, then with sched_yield, then with sleeps in between, because
other ranks may need the processor. core.tuning has the times (MPI_*). Used by the engine's thread.
"""

import ctypes
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from ...core import tuning
from ...core.errors import StallError
from ...core.interruption import Interruption
from ...core.topology import Topology, describe_wait


class PeerWait:
    """A rank's waits for `peers`. A wait fails after `limit_s` seconds (0: never), or when `interruption` ends it."""

    def __init__(self, topology: Topology, peers: Sequence[int], limit_s: float,
                 interruption: Interruption | None = None):
        self._topology, self._limit_s, self._interruption = topology, limit_s, interruption or Interruption()
        self._peers = [peer for peer in peers if peer != topology.rank]
        # The requests of waits that have ended in an error. MPI may use their memory.
        self.unfinished: list[MPI.Request] = []

    def complete(self, requests: Sequence[MPI.Request], nbytes: int = 0, others: Sequence[int] | None = None) -> None:
        """Wait until `requests` are complete, without holding the GIL. For `nbytes` and the errors see `until`.

        `others`: The ranks that the requests depend on, for the error text; None: all peers. After a StallError the
        memory of the requests is never freed, because MPI may still use it.
        """
        test = MPI.Request.Testall
        try:
            for _ in range(tuning.MPI_SPIN_TESTS):
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
            missing: Returns the ranks that the wait depends on, for the error text; None: all peers.
            nbytes: The bytes to transfer during the wait. More bytes delay the first sleep.
            limit_s: Replaces the limit of this object.

        Raises:
            StallError: `is_done` is false after the limit. The text names the ranks, hosts and likely causes.
            RanksLostError: The wait is interrupted.
        """
        began, yield_s = time.monotonic(), tuning.MPI_YIELD_S + nbytes / tuning.MPI_YIELD_BYTES_PER_S
        limit_s = self._limit_s if limit_s is None else limit_s
        while not is_done():
            waited_s = time.monotonic() - began
            self._interruption.check()
            if 0 < limit_s < waited_s:
                raise StallError(describe_wait(self._topology, missing() if missing else self._peers, waited_s))
            if waited_s < yield_s:
                os.sched_yield()
            else:
                pause_s = max(waited_s / tuning.MPI_SLEEP_DIVISOR, tuning.MPI_SHORTEST_SLEEP_S)
                time.sleep(min(pause_s, tuning.MPI_LONGEST_SLEEP_S))


def never_free(thing: object) -> None:
    """Keep `thing` alive for ever: MPI cannot abandon a request, and may write to its memory even in MPI_Finalize."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _pieces(array: np.ndarray) -> list[np.ndarray]:
    """Return the bytes of a C-contiguous 1-D array, in pieces of at most EAGER_MESSAGE_BYTES."""
    data, step = array.view(np.uint8), tuning.EAGER_MESSAGE_BYTES
    return [data[start:start + step] for start in range(0, data.nbytes, step)]


def exchange(comm: MPI.Comm, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]) -> list[MPI.Request]:
    """Start to send `sent[r]` to each other rank r of `comm`, and to receive `received[r]` from rank r.

    The arrays at the index of this rank are not used. Returns the requests to complete.

    Arrays travel in pieces that MPI sends at once (eager). MPI sends a larger message only after a reply. If both sides
    send all the time, the reply waits behind other data in the queue, and the wire is idle. Over 1 Gbit/s, 42 MB take
    506 ms in messages of 2 MiB, two in flight, and 352 ms in eager messages.
    """
    size, rank = comm.Get_size(), comm.Get_rank()
    # The others in turn from the next one on, so that not all send to the same one at first.
    others = [(rank + step) % size for step in range(1, size)]
    requests: list[MPI.Request] = []
    try:
        for other in others:
            for piece in _pieces(received[other]):
                requests.append(comm.Irecv([piece, MPI.BYTE], other))
        for other in others:
            for piece in _pieces(sent[other]):
                requests.append(comm.Isend([piece, MPI.BYTE], other))
    except BaseException:  # A rank is lost, and MPI may still use the memory of requests that have begun.
        never_free(requests)
        raise
    return requests
