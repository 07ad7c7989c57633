"""Files without a name that a rank has open, and that the other ranks of its host open, too, by way of Linux's /proc.

The kernel lets only processes of the same user do that, and root. Used in init(), by one thread.
"""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class OpenFile:
    """Where processes of the same host find a file that this process has open. Ranks send it to each other over MPI.

    Attributes:
        process, descriptor: Who has it open, and as what.
        device, inode: Which file it is.
    """

    process: int
    descriptor: int
    device: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> "OpenFile":
        """That of a descriptor of this process, which must stay open until the others have opened the file."""
        status = os.fstat(descriptor)
        return cls(os.getpid(), descriptor, status.st_dev, status.st_ino)

    def open(self, flags: int) -> int:
        """Open the file anew. Returns a descriptor that is closed when a program is executed.

        Raises:
            OSError: This process may not, or does not see the other one.
        """
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        # First, since in containers the number may be that of another process: to open its files might have effects.
        status = os.stat(path)
        if (status.st_dev, status.st_ino) != (self.device, self.inode):
            raise OSError("it shows other processes than those of the job")
        return os.open(path, flags | os.O_CLOEXEC)
