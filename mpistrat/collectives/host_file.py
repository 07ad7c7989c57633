"""Memory that the ranks of one host share: an anonymous file, and how they come to it.

The file (memfd) is made by one rank and passed to the others over a Unix socket. An MPI-3 shared window would do the
same, but is a file in /dev/shm: containers often have 64 MB of that, and it may be left behind when all ranks are
killed. This memory has no name, no limit of its own, and is gone with the last process.
"""

import array
import mmap
import os
import socket
from collections.abc import Sequence

from ..memory import rounded_up

_HAND_OVER_S = 60.0


class HostFile:
    """The file. What is asked of it in the same order is the same memory on all ranks of the host.

    Args:
        descriptor: Of the file; closed by `close`.
    """

    def __init__(self, descriptor: int):
        self._descriptor, self._end = descriptor, 0

    def take(self, nbytes: int, part: tuple[int, int] = (0, 1)) -> mmap.mmap:
        """The next `nbytes`, zeroed at first. Local.

        Args:
            nbytes: At least one.
            part: (k, n): Of n parts of it, this rank makes sure that the one with number k is there, and other ranks do
                so for the rest: part by part, it is near to their processors then. Nobody may use it before all have.

        Raises:
            OSError: There is none; what comes after it may be there.
        """
        (k, n), start = part, self._end
        self._end += rounded_up(nbytes, mmap.ALLOCATIONGRANULARITY)
        first, last = (min(rounded_up(nbytes * i // n, mmap.ALLOCATIONGRANULARITY), nbytes) for i in (k, k + 1))
        # Without this, memory that is not there would be found missing in the middle of a reduction.
        if first < last:
            os.posix_fallocate(self._descriptor, start + first, last - first)
        os.posix_fallocate(self._descriptor, start + nbytes - 1, 1)  # What lies beyond the end cannot be mapped.
        return mmap.mmap(self._descriptor, nbytes, offset=start)

    def close(self) -> None:
        """Nothing more will be asked for. What was taken stays for as long as somebody uses it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HandOver:
    """How the ranks of a host come to one file. First construct it on all ranks, then call `share`.

    Args:
        rank: This rank.
        local_ranks: The ranks on this host; the first one makes the file.
        token: A text that no other job on this host uses, the same on all ranks.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], token: str):
        self._rank, self._leader = rank, local_ranks[0]
        self._receivers = [f"\0mpistrat-{token}-memory-{other}" for other in local_ranks[1:]]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        if rank != self._leader:
            self._socket.bind(f"\0mpistrat-{token}-memory-{rank}")
            self._socket.settimeout(_HAND_OVER_S)

    def share(self) -> HostFile:
        """The file. Collective within the host.

        Raises:
            OSError: This rank has none; the others may have.
        """
        with self._socket:
            if self._rank != self._leader:
                _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
                if not descriptors:
                    raise OSError(f"rank {self._leader} could not make it")
                os.set_inheritable(descriptors[0], False)
                return HostFile(descriptors[0])
            try:
                descriptor = os.memfd_create("mpistrat")
            except OSError:
                for receiver in self._receivers:
                    self._socket.sendto(b"\0", receiver)
                raise
            for receiver in self._receivers:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
                self._socket.sendmsg([b"\0"], [rights], 0, receiver)
            return HostFile(descriptor)
