"""Descriptors that one rank of a host passes to the others (SCM_RIGHTS), while other users of the machine are kept out.

Every user can read the names of Unix sockets, and write to those in Linux's abstract namespace. So the first rank of
the host listens under such a name during init() only, and serves who is of the same user, as the kernel has it
(SO_PEERCRED), and knows a secret that travels over MPI; both sides check both. What has been passed on has no name.
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

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0  # for all ranks of the host to come
_GREETING_LIMIT_S = 5.0  # for a process of the same user to say what it wants
_PROOF_BYTES = 16
_GREETING = struct.Struct(f"={_PROOF_BYTES}sI")  # the first half of the secret, and the rank
_PARCEL = struct.Struct(f"={_PROOF_BYTES}sI")  # the second half, and how many descriptors there are in all
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_AT_ONCE = 128  # descriptors in one message; the kernel takes 253
_INT_BYTES = array.array("i").itemsize


@dataclass(frozen=True)
class Invitation:
    """What the first rank of a host tells the others over MPI: under which name it listens, and a secret."""

    name: str
    secret: bytes


class FdExchange:
    """One rank's side of it. The first rank of the host calls `give`, the others `take`; then all `close`.

    Args:
        rank: This rank.
        local_ranks: The ranks of this host.

    Attributes:
        invitation: For the other ranks of the host; None on these, and where there are none.

    Raises:
        OSError: This rank cannot listen.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int]):
        self._rank, self._giver = rank, local_ranks[0]
        self._listener: socket.socket | None = None
        self.invitation: Invitation | None = None
        if rank == self._giver and len(local_ranks) > 1:
            # Nobody can take the name before this rank has it, since nobody knows it.
            self.invitation = Invitation(f"mpistrat-{secrets.token_hex(16)}", secrets.token_bytes(2 * _PROOF_BYTES))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._listener.bind("\0" + self.invitation.name)
                self._listener.listen(len(local_ranks))
            except OSError:
                self._listener.close()
                raise

    def give(self, parcels: Mapping[int, Sequence[int]]) -> None:
        """Pass each rank its descriptors, in order; they stay open here. Returns when all have them.

        Args:
            parcels: For each other rank of this host, at least one.

        Raises:
            OSError: A rank has not come in time, or has ended.
        """
        assert self._listener is not None and self.invitation is not None
        missing, until = set(parcels), time.monotonic() + _LIMIT_S
        while missing:
            left_s = until - time.monotonic()
            try:
                if left_s <= 0:
                    raise TimeoutError
                self._listener.settimeout(left_s)
                line, _ = self._listener.accept()
            except TimeoutError:
                raise OSError(f"ranks {sorted(missing)} have not come to rank {self._rank} on the same host for "
                              f"{_LIMIT_S:.0f} s. Do they run in containers that do not share their network?") from None
            with line:
                rank = self._greeted(line)
                if rank in missing:
                    try:
                        self._pass(line, parcels[rank])
                    except OSError as error:
                        raise OSError(f"rank {rank} has not taken what rank {self._rank} gave it: {error}") from error
                    missing.remove(rank)

    def _greeted(self, line: socket.socket) -> int | None:
        """Which rank it is; None for a stranger."""
        assert self.invitation is not None
        process, user, _ = peer_of(line)
        if user != os.geteuid():
            logger.debug("rank %d: process %d of user %d, which is not this one, was turned away", self._rank, process,
                         user)
            return None
        line.settimeout(_GREETING_LIMIT_S)
        greeting = b""
        with contextlib.suppress(OSError):  # It says nothing, or has ended.
            # Descriptors that come along are closed by the kernel, since there is no room for them.
            greeting = line.recv(_GREETING.size + 1)
        if len(greeting) == _GREETING.size:
            proof, rank = _GREETING.unpack(greeting)
            if hmac.compare_digest(proof, self.invitation.secret[:_PROOF_BYTES]):
                return int(rank)
        logger.debug("rank %d: process %d of this user does not belong to the job, and was turned away", self._rank,
                     process)
        return None

    def _pass(self, line: socket.socket, descriptors: Sequence[int]) -> None:
        assert self.invitation is not None
        line.settimeout(_LIMIT_S)
        parcel = _PARCEL.pack(self.invitation.secret[_PROOF_BYTES:], len(descriptors))
        for start in range(0, len(descriptors), _AT_ONCE):
            rights = array.array("i", descriptors[start:start + _AT_ONCE])
            line.sendmsg([parcel], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            # The kernel limits how many descriptors of a user are on their way.
            if line.recv(1) != b"\0":
                raise ConnectionResetError("it has ended")

    def take(self, invitation: Invitation) -> list[int]:
        """What the first rank of the host gives this one, in order; they are closed when a program is executed.

        Raises:
            OSError: It gives nothing, or what answers in its place is something else.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            # For this limit, unlike Python's, the kernel waits while the queue of the listener is full.
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_LIMIT_S), 0))
            try:
                line.connect("\0" + invitation.name)
            except OSError as error:
                raise OSError(f"rank {self._giver} on the same host is not reached: {error}. Do they run in containers "
                              "that do not share their network?") from error
            process, user, _ = peer_of(line)
            if user != os.geteuid():
                raise OSError(f"process {process} of user {user} answers in the place of rank {self._giver}")
            line.settimeout(_LIMIT_S)
            line.send(_GREETING.pack(invitation.secret[:_PROOF_BYTES], self._rank))
            taken: list[int] = []
            try:
                self._take(line, invitation.secret[_PROOF_BYTES:], taken)
            except BaseException:
                close_all(taken)
                raise
            return taken

    def _take(self, line: socket.socket, proof: bytes, taken: list[int]) -> None:
        total = 1
        while len(taken) < total:
            parcel, ancillary, flags, _ = line.recvmsg(
                _PARCEL.size + 1, socket.CMSG_SPACE(_AT_ONCE * _INT_BYTES), socket.MSG_CMSG_CLOEXEC)
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    taken += array.array("i", data[:len(data) - len(data) % _INT_BYTES])
            if not parcel:
                raise OSError(f"rank {self._giver} on the same host has ended or gives nothing")
            said = b""
            if len(parcel) == _PARCEL.size:
                said, total = _PARCEL.unpack(parcel)
            if not hmac.compare_digest(said, proof):
                raise OSError(f"what answers in the place of rank {self._giver} does not belong to the job")
            if flags & socket.MSG_CTRUNC or not ancillary or len(taken) > total:
                raise OSError(f"of the {total} descriptors of rank {self._giver} only some can be taken. How many a "
                              "process may have is limited (ulimit -n)")
            line.send(b"\0")

    def close(self) -> None:
        """Listen no more. May be called twice."""
        if self._listener is not None:
            self._listener.close()


def peer_of(line: socket.socket) -> tuple[int, int, int]:
    """Process, effective user and group of the other side of a Unix socket, when it connected or began to listen."""
    process, user, group = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED,
                                                               _CREDENTIALS.size))
    return process, user, group


def close_all(descriptors: Sequence[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)
