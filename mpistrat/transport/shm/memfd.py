"""Shared memory of the ranks of one host: an anonymous file (memfd).

One rank makes the file, and the others open it; see open_file. An MPI-3 shared window would be a file in /dev/shm, of
which containers often have only 64 MB, and it may stay behind when all ranks are killed. This memory has no name and no
limit of its own, and the kernel frees it with the last process. Used in init(), by one thread.
"""

import mmap
import os


def map_file(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the first `nbytes` (at least one) of the file, which are zero at first. They outlive the descriptor. Local.

    Raises:
        OSError: There is not enough memory.
    """
    # Allocates now. Otherwise the kernel would kill this rank in a reduction, if there is not enough memory.
    os.posix_fallocate(descriptor, 0, nbytes)
    return mmap.mmap(descriptor, nbytes)
