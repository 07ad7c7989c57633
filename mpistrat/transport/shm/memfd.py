"""Memory that the ranks of one host share: an anonymous file.

The file (memfd) is made by one rank and passed to the others; see host_link. An MPI-3 shared window would do the same,
but is a file in /dev/shm: containers often have 64 MB of that, and it may be left behind when all ranks are killed.
This memory has no name, no limit of its own, and is gone with the last process.
"""

import fcntl
import mmap
import os

from ...core.memory import rounded_up

# The file grows while it is used. If it became shorter, ranks would be killed when they touch what is no longer there.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class HostFile:
    """The file. What is asked of it in the same order is the same memory on all ranks of the host.

    Args:
        descriptor: Of the file; closed by `close`.
    """

    def __init__(self, descriptor: int):
        self._descriptor, self._end = descriptor, 0

    @classmethod
    def make(cls) -> "HostFile":
        """A new one, which can grow, but not shrink. Only processes that this one gives it to can open it.

        Raises:
            OSError: There is none to be had.
        """
        descriptor = os.memfd_create("mpistrat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(descriptor, 0o600)  # else those who may look into /proc could open it
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def over(cls, descriptor: int) -> "HostFile":
        """That of another rank, which `make` has made there.

        Raises:
            OSError: It is something else, and has been closed.
        """
        try:
            seals, owner = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS), os.fstat(descriptor).st_uid
            if seals != _SEALS or owner != os.geteuid():
                raise OSError(f"what came is of user {owner} and can be changed in other ways than growing")
        except OSError as error:
            os.close(descriptor)
            raise OSError(f"this is not the file that was to be shared: {error}") from error
        return cls(descriptor)

    def fileno(self) -> int:
        """The descriptor; -1 when it is closed."""
        return self._descriptor

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
