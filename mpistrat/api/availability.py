"""Which ways to move tensors this machine has, for `mpistrat check` and `nccl_built()`.

What a backend needs is imported when it is asked for: mpi4py loads an MPI library, and cupy is often not there.
"""

from dataclasses import dataclass

from ..core.errors import MpistratError
from ..transport.mpi import library


@dataclass(frozen=True)
class Backend:
    """A way to move tensors, and whether it can be used here."""

    name: str
    available: bool
    reason: str = ""


def backends() -> list[Backend]:
    """The ways to move tensors that are known, and for each whether this process can use it. Loads mpi4py, and cupy."""
    try:
        mpi = library.load_mpi()
        library.require_thread_level(mpi)
        found = Backend("mpi", True)
    except MpistratError as error:
        found = Backend("mpi", False, str(error))
    return [Backend("local", True, "one rank only"), found, _shared_memory_backend(), _nccl_backend()]


def _shared_memory_backend() -> Backend:
    from ..transport.shm.memfd import HostFile
    try:
        file = HostFile.make()
        try:
            file.take(4096)
        finally:
            file.close()
    except OSError as error:
        return Backend("shared_memory", False, str(error))
    return Backend("shared_memory", True, "among the ranks of a host, of all sizes")


def _nccl_backend() -> Backend:
    try:
        from ..gpu.device import Device, gpu_count
    except ImportError as error:
        return Backend("nccl", False, f"cupy cannot be imported: {error} (pip install 'mpistrat[gpu]')")
    if not Device.nccl_version():
        return Backend("nccl", False, "cupy finds no NCCL (pip install 'mpistrat[gpu]')")
    if not gpu_count():
        return Backend("nccl", False, "no GPU is visible")
    return Backend("nccl", True, "tensors on GPUs")
