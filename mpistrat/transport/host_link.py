"""Connects the ranks of one host: by sockets, and by an anonymous file of shared memory (memfd).

The first rank of the host makes the sockets and the file, and passes their descriptors to the other ranks (SCM_RIGHTS).
Other processes cannot open the sockets and the file, which have no names. Used in init(), by one thread.

To pass the descriptors, the first rank listens on a socket with a name in Linux's abstract namespace, during init()
only. Every user of the machine can read this name and connect. Therefore both sides check that the peer has the same
user id, which the kernel reports (SO_PEERCRED), and the same secret, which the ranks exchange over MPI.

An MPI-3 shared window is not used, because it would be a file in /dev/shm. Containers often have only 64 MB there, and
the file may stay behind when all ranks are killed. A memfd has no limit of its own, and ends with the last process.
"""

import array
import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.interruption import Interruption
from ..core.tuning import DESCRIPTORS_PER_MESSAGE
from .unix_socket import ChannelSockets, UnixSocketChannel

logger = logging.getLogger(__name__)

_LIMIT_S = 60.0  # for all ranks of the host to connect
_CHECK_S = 0.1  # between two looks whether the wait is interrupted
_GREETING_LIMIT_S = 5.0  # for a connected process of the same user to send its greeting
_PROOF_BYTES = 16
_GREETING = struct.Struct(f"={_PROOF_BYTES}sI")  # the first half of the secret, and the sender's rank
_HEADER = struct.Struct(f"={_PROOF_BYTES}sI")  # the second half, and the number of all descriptors
_CREDENTIALS = struct.Struct("=iII")  # process, user, group
_INT_BYTES = array.array("i").itemsize
# The file may grow, but not shrink: a rank that touches memory beyond the end is killed (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True)
class Invitation:
    """The name under which the first rank of a host listens, and a secret. The other ranks get both over MPI."""

    name: str
    secret: bytes


class FdExchange:
    """Passes file descriptors: the first rank of a host calls `give`, the others `take`, and then all call `close`.

    `local_ranks`: The ranks of the host. `interruption` ends `give`. Raises OSError: The first rank cannot listen.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], interruption: Interruption | None = None):
        self._rank, self._giver, self._interruption = rank, local_ranks[0], interruption or Interruption()
        self._listener: socket.socket | None = None
        # On the first rank, the argument of `take` of the other ranks; None elsewhere, and if this rank is alone.
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
        """Send each rank r in `descriptors` its `descriptors[r]`, at least one. Returns when all ranks have theirs.

        Raises OSError: A rank has not connected in time, or has ended. RanksLostError: The wait is interrupted.
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
        """Return the rank of the peer; None if the peer does not belong to the job."""
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
        """Return this rank's descriptors, close-on-exec, in the order in which the first rank of the host sends them.

        Raises OSError: The first rank cannot be reached or sends too few, or a different process answers in its place.
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
    """Return the process id and effective user id that a Unix socket's peer had when it connected or called listen."""
    process, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED,
                                                                 _CREDENTIALS.size))
    return process, user


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# -- the file of shared memory -----------------------------------------------------------------------------------------


class HostFile:
    """An anonymous file of shared memory (memfd), all zero at first. Only processes with a descriptor can use it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor  # -1 after `close`

    @classmethod
    def make(cls) -> "HostFile":
        """Make a file that can grow, but not shrink. Raises OSError: The kernel does not make the file."""
        descriptor = os.memfd_create("mpistrat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)  # else other users could open it by way of /proc
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def over(cls, descriptor: int) -> "HostFile":
        """Wrap the descriptor of a file that the first rank of the host made with `make`.

        Raises OSError: `descriptor` is not of such a file. In this case `descriptor` is closed.
        """
        try:
            seals, owner = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_uid
            if seals != _SEALS or owner != os.geteuid():
                raise OSError(f"expected user {os.geteuid()} and seals {_SEALS}. Received: user {owner}, seals {seals}")
        except OSError as error:
            os.close(descriptor)
            raise OSError(f"the received descriptor is not a file of shared memory: {error}") from error
        return cls(descriptor)

    def map(self, nbytes: int) -> mmap.mmap:
        """Allocate the first `nbytes` (at least 1) of the file, and return them as mapped memory. Local.

        Raises OSError: There is not enough memory for `nbytes`. There may be enough for fewer bytes.
        """
        # Allocates the memory now. Otherwise, without enough memory, the kernel would kill this rank in a reduction.
        os.posix_fallocate(self.descriptor, 0, nbytes)
        return mmap.mmap(self.descriptor, nbytes)

    def close(self) -> None:
        """Close the descriptor. Memory that was mapped stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


# -- the links ---------------------------------------------------------------------------------------------------------


class HostLink:
    """Connects one rank with the other ranks of its host. All of them construct it, call `connect`, and then `close`.

    `local_ranks`: The ranks of this host. The first one makes the sockets and the file. `job_ranks`: The ranks of the
    same processes in the whole job, for error messages; None: equal to `local_ranks`. `interruption` ends the wait for
    the other ranks. Raises OSError: This is the first rank, and it cannot listen.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], job_ranks: Sequence[int] | None = None,
                 interruption: Interruption | None = None):
        self._rank, self._ranks = rank, tuple(local_ranks)
        self._job_ranks = dict(zip(local_ranks, job_ranks or local_ranks, strict=True))
        self._exchange = FdExchange(self._job_ranks[rank], list(self._job_ranks.values()), interruption)
        self.invitation = self._exchange.invitation
        self._file: HostFile | None = None
        self._first = f"rank {self._job_ranks[local_ranks[0]]}"
        self._no_file = OSError(f"{self._first} could not make the file of shared memory")

    def connect(self, invitation: Invitation | None) -> UnixSocketChannel:
        """Connect the ranks of the host, and return this rank's channel. Collective within the host.

        `invitation`: From the host's first rank. Raises OSError, perhaps only on some ranks, if a connection fails.
        """
        sockets = self._give() if self._rank == self._ranks[0] else self._take(invitation)
        return UnixSocketChannel(self._rank, sockets)

    def _give(self) -> ChannelSockets:
        try:
            self._file = HostFile.make()
        except OSError as error:
            self._no_file = error
        shared = [] if self._file is None else [self._file.descriptor]
        made = ChannelSockets.make(self._ranks)
        try:
            outboxes = [made[self._rank].outboxes[rank].fileno() for rank in self._ranks]
            if len(self._ranks) > 1:
                self._exchange.give({self._job_ranks[rank]: [made[rank].inbox.fileno(), *outboxes, *shared]
                                     for rank in self._ranks[1:]})
        except BaseException:
            made[self._rank].close()
            raise
        finally:
            self._exchange.close()
            # The other ranks have their inboxes now. With a copy open here, a rank's end would not close its inbox.
            for rank in self._ranks[1:]:
                made[rank].inbox.close()
        return made[self._rank]

    def _take(self, invitation: Invitation | None) -> ChannelSockets:
        if invitation is None:
            raise OSError(f"{self._first}, on this host, could not open its listening socket")
        taken = self._exchange.take(invitation)
        count = 1 + len(self._ranks)
        try:
            if len(taken) not in (count, count + 1):
                raise OSError(f"{self._first} gave {len(taken)} descriptors, not {count}, to connect "
                              f"{len(self._ranks)} ranks")
            sockets = ChannelSockets.over(taken[:count], self._ranks)
        except BaseException:
            close_all(taken)
            raise
        if len(taken) > count:
            try:
                self._file = HostFile.over(taken[count])
            except OSError as error:
                self._no_file = error
        return sockets

    def file(self) -> HostFile:
        """Return the file of shared memory, which is open until `close`. Local.

        Raises OSError: This rank has no such file. Other ranks of the host may have it.
        """
        if self._file is None:
            raise self._no_file
        return self._file

    def close(self) -> None:
        """Stop listening, and close the file; memory that was mapped stays mapped. May be called twice."""
        self._exchange.close()
        if self._file is not None:
            self._file.close()
