"""Control plane: sends messages to ranks of this host over a local channel, and to ranks of other hosts over MPI.

Used by the engine's thread, except `wake`, which any thread may call.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ...core import tuning
from ...core.interfaces import ControlPlane
from ..shm.ring import LocalChannel
from .requests import PeerWait


class MpiControl(ControlPlane):
    """Sends to ranks of this host over `channel`, and to ranks of other hosts with MPI point-to-point messages.

    If all `peers` are on this host, this rank sleeps until a message arrives. Otherwise it polls MPI: first without
    pauses, yielding the processor at each poll, and then at growing intervals. core.tuning has the times (MPI_POLL_*).

    Args:
        comm: The communicator of all ranks, reserved for this object. `close` frees `comm`.
        channel: This rank's channel to `local_ranks`, the ranks on this host. `close` closes `channel`.
        peers: All ranks that may send messages to this rank.
        polls: Whether to poll MPI in any case, because the function given to `channel.watch` looks for MPI messages.
    """

    _TAG = 1

    def __init__(self, comm: MPI.Comm, channel: LocalChannel, local_ranks: Sequence[int], peers: Sequence[int],
                 wait: PeerWait, polls: bool = False):
        self._comm, self._channel, self._wait = comm, channel, wait
        self._local = frozenset(local_ranks)
        self._polls = polls or any(peer not in self._local for peer in peers)
        self._spans_hosts = comm.Get_size() > len(self._local)
        self._status = MPI.Status()
        self._sending: list[tuple[int, MPI.Request, bytes]] = []  # (receiver, request, message)

    def send(self, rank: int, message: bytes) -> None:
        if rank in self._local:
            self._channel.send(rank, message)
        else:
            self._sending.append((rank, self._comm.Isend([message, MPI.BYTE], dest=rank, tag=self._TAG), message))

    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        # Messages between hosts, too: MPI sends a large message only after a reply of the receiver (rendezvous), and
        # only while this rank is in an MPI call. In the next collective this rank may wait in shared memory alone.
        if self._missing(ranks):
            self._wait.until(lambda: self._has_flushed(ranks), lambda: self._missing(ranks), limit_s=limit_s)

    def is_sending_to(self, ranks: Sequence[int]) -> bool:
        return bool(self._missing(ranks))

    def _has_flushed(self, ranks: Sequence[int]) -> bool:
        self._channel.flush()
        self._comm.Iprobe()  # Lets MPI make progress here, which a receiver in an earlier collective may depend on.
        self._forget_sent()
        return not self._missing(ranks)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Return those of `ranks` to which this rank is still sending a message."""
        underway = {rank for rank, _, _ in self._sending}
        return [rank for rank in ranks if rank in underway or self._channel.is_sending_to([rank])]

    def _forget_sent(self) -> None:
        self._sending = [sending for sending in self._sending if not sending[1].Test()]

    def poll(self) -> list[tuple[int, bytes]]:
        if self._channel.is_sending:
            self._channel.flush()
        messages = self._channel.receive()
        if self._polls:
            if self._sending:
                self._forget_sent()
            while self._comm.Iprobe(tag=self._TAG, status=self._status):
                source = self._status.Get_source()
                messages.append((source, self._received(source, self._status.Get_count(MPI.BYTE))))
        return messages

    def _received(self, source: int, nbytes: int) -> bytes:
        """Return the message of `nbytes` that Iprobe has found. Raises StallError: It does not arrive in time."""
        # Only the first part of a large message has arrived (rendezvous). MPI_Recv would wait for the rest for ever if
        # the network fails in between. A small message is complete at the first test.
        message = bytearray(nbytes)
        request = self._comm.Irecv([message, MPI.BYTE], source, self._TAG)
        if not request.Test():
            self._wait.complete([request], nbytes, [source])
        return bytes(message)

    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        if not self._polls:
            longest_s = tuning.MPI_POLL_LONGEST_SLEEP_S if self._channel.is_sending else timeout_s
            if self._spans_hosts:  # See Interruption.progress.
                MPI.COMM_SELF.Iprobe()
                longest_s = min(longest_s, tuning.MPI_POLL_LONGEST_SLEEP_S + quiet_s / tuning.MPI_POLL_SLEEP_DIVISOR)
            self._channel.wait(min(timeout_s, longest_s), spin_s)
            return
        spin_s = (tuning.MPI_POLL_CALLER_SPIN_S if spin_s else tuning.MPI_POLL_SPIN_S) - quiet_s
        if spin_s > 0:
            # One poll only, if messages wait for room in the channel: the caller must send them.
            deadline = time.monotonic() + (0.0 if self._channel.is_sending else min(spin_s, timeout_s))
            while True:
                os.sched_yield()
                # Checks these two only, since a cycle of the engine takes the processor from other ranks for longer.
                if self._channel.ready() or self._comm.Iprobe(tag=self._TAG) or time.monotonic() >= deadline:
                    return
        # Pauses in proportion to the wait so far, which makes no wait much longer than necessary.
        pause_s = max(quiet_s / tuning.MPI_POLL_SLEEP_DIVISOR, tuning.MPI_SHORTEST_SLEEP_S)
        self._channel.wait(min(timeout_s, pause_s, tuning.MPI_POLL_LONGEST_SLEEP_S))

    def wake(self) -> None:
        self._channel.wake()

    def revoke(self) -> list[Any]:
        self._channel.close()
        return [self._comm, *(request for _, request, _ in self._sending), *self._wait.unfinished]

    def close(self) -> None:
        if self._comm == MPI.COMM_NULL:
            return
        self.flush(tuple(self._local))
        self._wait.complete([request for _, request, _ in self._sending])
        self._sending.clear()
        self._channel.close()
        self._comm.Free()
