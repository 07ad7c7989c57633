"""Control messages over MPI."""

import os
import time
from collections.abc import Sequence

from mpi4py import MPI

from ...core.interfaces import ControlPlane, LocalChannel
from .peer_wait import PeerWait, peer_wait_without_end


class MpiControl(ControlPlane):
    """Messages to ranks of this host by mail, to other hosts over MPI point to point.

    With all its peers on this host a rank sleeps until a message comes. A rank with peers on other hosts must poll MPI
    for them: first without a pause, giving way to others at each look (for a millisecond where a caller waits, and 50
    microseconds in the background), and then at growing intervals up to 3 ms.

    Args:
        comm: Nobody else uses it.
        mail: The mailbox of this rank.
        local_ranks: The ranks on this host.
        peers: The ranks that will ever send to this one.
        polls: Whether MPI must be polled for something else, too, of which the mail knows.
        wait: For any rank; None: without a limit.
    """

    _TAG = 1
    _SPIN_S = 50e-6
    _CALLERS_SPIN_S = 1e-3  # a pause and a poll cost more than a message between hosts takes
    _SHORTEST_S = 50e-6
    _LONGEST_S = 3e-3

    def __init__(self, comm: MPI.Comm, channel: LocalChannel, local_ranks: Sequence[int], peers: Sequence[int],
                 polls: bool = False, wait: PeerWait | None = None):
        self._comm, self._channel, self._wait = comm, channel, wait or peer_wait_without_end()
        self._local = frozenset(local_ranks)
        self._polls = polls or any(peer not in self._local for peer in peers)
        self._status = MPI.Status()
        self._sending: list[tuple[int, MPI.Request, bytes]] = []  # to which rank, and what

    def send(self, rank: int, message: bytes) -> None:
        if rank in self._local:
            self._channel.send(rank, message)
        else:
            self._sending.append((rank, self._comm.Isend([message, MPI.BYTE], dest=rank, tag=self._TAG), message))

    def flush(self, ranks: Sequence[int], limit_s: float | None = None) -> None:
        # Messages between hosts, too: MPI asks the receiver of a large one first, and sends it only while this rank is
        # in a call of MPI. In the collective that follows, this rank may wait in shared memory alone.
        if self._missing(ranks):
            self._wait.until(lambda: self._is_flushed(ranks), lambda: self._missing(ranks), limit_s=limit_s)

    def _is_flushed(self, ranks: Sequence[int]) -> bool:
        self._channel.flush()
        self._comm.Iprobe()  # A receiver that is still in an earlier collective may need MPI to move on here too.
        self._forget_sent()
        return not self._missing(ranks)

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Those of `ranks` to which something is still on its way."""
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
                message = bytearray(self._status.Get_count(MPI.BYTE))
                source = self._status.Get_source()
                self._comm.Recv([message, MPI.BYTE], source=source, tag=self._TAG)
                messages.append((source, bytes(message)))
        return messages

    def wait(self, timeout_s: float, spin_s: float = 0.0, quiet_s: float = 0.0) -> None:
        if not self._polls:
            self._channel.wait(min(timeout_s, self._LONGEST_S) if self._channel.is_sending else timeout_s, spin_s)
            return
        spin_s = (self._CALLERS_SPIN_S if spin_s else self._SPIN_S) - quiet_s
        if spin_s > 0:
            # What waits for room in the mail is for the caller to send on.
            until = time.monotonic() + (0.0 if self._channel.is_sending else min(spin_s, timeout_s))
            while True:
                os.sched_yield()
                # Far less than a round of the engine: what a rank does while it looks, another on its processor waits
                # for.
                if self._channel.ready() or self._comm.Iprobe(tag=self._TAG) or time.monotonic() >= until:
                    return
        # A pause in proportion to the wait so far makes no wait much longer than it must be.
        self._channel.wait(min(timeout_s, max(quiet_s / 8, self._SHORTEST_S), self._LONGEST_S))

    def wake(self) -> None:
        self._channel.wake()

    def close(self) -> None:
        if self._comm == MPI.COMM_NULL:
            return
        self.flush(tuple(self._local))
        self._wait.complete([request for _, request, _ in self._sending])
        self._sending.clear()
        self._channel.close()
        self._comm.Free()
