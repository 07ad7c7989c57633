"""Shared memory of the ranks of one host: an anonymous file (memfd).

One rank makes the file and passes it to the others; see host_link. An MPI-3 shared window would be a file in /dev/shm,
of which containers often have only 64 MB, and it may stay behind when all ranks are killed. This memory has no name and
no limit of its own, and the kernel frees it with the last process. Used in init(), by one thread.
"""

import fcntl
import mmap
import os

# The file may grow, but not shrink: a rank that touches memory beyond the end is killed (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class HostFile:
    """The file of shared memory, which is zero at first. `descriptor`: The file's descriptor; `close` closes it."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    @classmethod
    def make(cls) -> "HostFile":
        """Make a file that can grow, but not shrink. Other processes get the file only if this process passes it on.

        Raises OSError: The kernel does not make the file.
        """
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
        """Wrap a file that another rank made with `make`.

        Raises OSError: The descriptor is not of a file made with `make`. The descriptor is closed.
        """
        try:
            seals, owner = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_uid
            if seals != _SEALS or owner != os.geteuid():
                raise OSError(f"expected user {os.geteuid()} and seals {_SEALS}. Received: user {owner}, seals {seals}")
        except OSError as error:
            os.close(descriptor)
            raise OSError(f"the received descriptor is not a file of shared memory: {error}") from error
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor; -1 after `close`."""
        return self._descriptor

    def map(self, nbytes: int) -> mmap.mmap:
        """Map the first `nbytes` (at least 1) of the file. Local.

        Raises OSError: There is not enough memory for `nbytes`. There may be enough for fewer bytes.
        """
        # Allocates the memory now. Otherwise, without enough memory, the kernel would kill this rank in a reduction.
        os.posix_fallocate(self._descriptor, 0, nbytes)
        return mmap.mmap(self._descriptor, nbytes)

    def close(self) -> None:
        """Close the descriptor. Memory that was mapped stays mapped."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
