"""Passes descriptors from the first rank of a host to the others (SCM_RIGHTS), and keeps other processes out.

Every user of a machine can read the names of Unix sockets, and connect to sockets in Linux's abstract namespace. So the
first rank listens under an abstract name during init() only. Both sides check that the peer has the same user id, which
the kernel reports (SO_PEERCRED), and the same secret, which the ranks exchange over MPI. Used by one thread.
"""

import array
import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.interruption import Interruption
from ..core.tuning import DESCRIPTORS_PER_MESSAGE

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0  # for all ranks of the host to connect
_CHECK_S = 0.1  # between two looks whether the wait is interrupted
_GREETING_LIMIT_S = 5.0  # for a connected process of the same user to send its greeting
_PROOF_BYTES = 16
_GREETING = struct.Struct(f"={_PROOF_BYTES}sI")  # the first half of the secret, and the sender's rank
_HEADER = struct.Struct(f"={_PROOF_BYTES}sI")  # the second half, and the number of all descriptors
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_INT_BYTES = array.array("i").itemsize


@dataclass(frozen=True)
class Invitation:
    """The name under which the first rank of a host listens, and a secret. The other ranks get both over MPI."""

    name: str
    secret: bytes


class FdExchange:
    """One rank's side of the exchange. The first rank of the host calls `give`, the others `take`; then all `close`.

    Args:
        local_ranks: The ranks of this host.
        interruption: Interrupts `give`; None: `give` cannot be interrupted.

    Raises:
        OSError: This rank cannot listen.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], interruption: Interruption | None = None):
        self._rank, self._giver, self._interruption = rank, local_ranks[0], interruption or Interruption()
        self._listener: socket.socket | None = None
        # On the first rank, the argument of `take` of the other ranks; None on the other ranks, and without others.
        self.invitation: Invitation | None = None
        if rank == self._giver and len(local_ranks) > 1:
            # The name is random, so no other process can have bound it.
            self.invitation = Invitation(f"mpistrat-{secrets.token_hex(16)}", secrets.token_bytes(2 * _PROOF_BYTES))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._listener.bind("\0" + self.invitation.name)
                self._listener.listen(len(local_ranks))
            except OSError:
                self._listener.close()
                raise

    def give(self, descriptors: Mapping[int, Sequence[int]]) -> None:
        """Send each rank its descriptors, in order. Returns when all ranks have received them. Closes no descriptor.

        Args:
            descriptors: At least one descriptor for each other rank of this host.

        Raises:
            OSError: A rank has not connected in time, or has ended.
            RanksLostError: The wait is interrupted.
        """
        assert self._listener is not None and self.invitation is not None
        missing, deadline = set(descriptors), time.monotonic() + _LIMIT_S
        while missing:
            left_s = deadline - time.monotonic()
            try:
                if left_s <= 0:
                    raise TimeoutError
                self._interruption.check()
                self._listener.settimeout(min(left_s, _CHECK_S))
                connection, _ = self._listener.accept()
            except TimeoutError:
                if left_s > _CHECK_S:
                    continue
                raise OSError(f"ranks {sorted(missing)} have not connected to rank {self._rank} on the same host in "
                              f"{_LIMIT_S:.0f} s. Do the ranks run in containers with separate networks?") from None
            with connection:
                rank = self._identify(connection)
                if rank in missing:
                    try:
                        self._send(connection, descriptors[rank])
                    except OSError as error:
                        raise OSError(f"rank {rank} has not received the descriptors of rank {self._rank}: "
                                      f"{error}") from error
                    missing.remove(rank)

    def _identify(self, connection: socket.socket) -> int | None:
        """The rank of the peer; None if the peer does not belong to the job."""
        assert self.invitation is not None
        process, user = _peer_of(connection)
        if user != os.geteuid():
            logger.debug("rank %d: process %d of another user, %d, was rejected", self._rank, process, user)
            return None
        connection.settimeout(_GREETING_LIMIT_S)
        greeting = b""
        with contextlib.suppress(OSError):  # The peer sends nothing, or has ended.
            # The kernel closes descriptors that come with the message, since there is no room for them.
            greeting = connection.recv(_GREETING.size + 1)
        if len(greeting) == _GREETING.size:
            proof, rank = _GREETING.unpack(greeting)
            if hmac.compare_digest(proof, self.invitation.secret[:_PROOF_BYTES]):
                return int(rank)
        logger.debug("rank %d: process %d of this user does not belong to the job, and was rejected", self._rank,
                     process)
        return None

    def _send(self, connection: socket.socket, descriptors: Sequence[int]) -> None:
        assert self.invitation is not None
        connection.settimeout(_LIMIT_S)
        header = _HEADER.pack(self.invitation.secret[_PROOF_BYTES:], len(descriptors))
        for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
            rights = array.array("i", descriptors[start:start + DESCRIPTORS_PER_MESSAGE])
            connection.sendmsg([header], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            # Wait, since the kernel limits how many descriptors of a user are in transit.
            if connection.recv(1) != b"\0":
                raise ConnectionResetError("the process of that rank has ended")

    def take(self, invitation: Invitation) -> list[int]:
        """Receive this rank's descriptors, which are close-on-exec, from the first rank of the host, in order.

        Raises OSError: The first rank sends nothing, or another process answers in its place.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            # Unlike settimeout, this limit makes connect wait while the backlog of the listener is full.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_LIMIT_S), 0))
            try:
                connection.connect("\0" + invitation.name)
            except OSError as error:
                raise OSError(f"rank {self._giver} on the same host cannot be reached: {error}. Do the ranks run in "
                              "containers with separate networks?") from error
            process, user = _peer_of(connection)
            if user != os.geteuid():
                raise OSError(f"process {process} of another user ({user}) answers in the place of rank {self._giver}")
            connection.settimeout(_LIMIT_S)
            connection.send(_GREETING.pack(invitation.secret[:_PROOF_BYTES], self._rank))
            taken: list[int] = []
            try:
                self._receive(connection, invitation.secret[_PROOF_BYTES:], taken)
            except BaseException:
                close_all(taken)
                raise
            return taken

    def _receive(self, connection: socket.socket, proof: bytes, taken: list[int]) -> None:
        total = 1
        while len(taken) < total:
            header, ancillary, flags, _ = connection.recvmsg(
                _HEADER.size + 1, socket.CMSG_SPACE(DESCRIPTORS_PER_MESSAGE * _INT_BYTES), socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    taken += array.array("i", data[:len(data) - len(data) % _INT_BYTES])
            if not header:
                raise OSError(f"rank {self._giver} on the same host has ended, or sends no descriptors")
            peer_proof = b""
            if len(header) == _HEADER.size:
                peer_proof, total = _HEADER.unpack(header)
            if not hmac.compare_digest(peer_proof, proof):
                raise OSError(f"the process that answers for rank {self._giver} does not belong to the job")
            if flags & socket.MSG_CTRUNC or not ancillary or len(taken) > total:
                raise OSError(f"this rank received only some of the {total} descriptors of rank {self._giver}. Raise "
                              "the limit on open files (ulimit -n)")
            connection.send(b"\0")

    def close(self) -> None:
        """Stop listening. May be called twice."""
        if self._listener is not None:
            self._listener.close()


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and effective user of the peer of a Unix socket, at the time the peer connected or began to listen."""
    process, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED,
                                                                 _CREDENTIALS.size))
    return process, user


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
