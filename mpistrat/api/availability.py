"""Which backends can run in this process, for `mpistrat doctor`.

The dependencies of a backend are imported when it is checked: mpi4py loads an MPI library, and cupy is optional. Called
by `mpistrat doctor`, in the process that cli/probe.py starts.
"""

from dataclasses import dataclass

from ..core.errors import MpistratError
from ..core.install import pip_extra
from ..transport.mpi import library
from .interop.own_gpu import why_no_cupy


@dataclass(frozen=True)
class BackendStatus:
    """Whether a backend can run here.

    Attributes:
        name: "local", "mpi", "shared_memory" or "nccl".
        available: Whether it can run.
        reason: Why it cannot, or what it is for.
    """

    name: str
    available: bool
    reason: str = ""


def backends() -> list[BackendStatus]:
    """Check every known backend. Local. Loads mpi4py with its MPI library, and cupy if it is installed."""
    try:
        mpi = library.load_mpi()
        library.require_thread_level(mpi)
        status = BackendStatus("mpi", True)
    except MpistratError as error:
        status = BackendStatus("mpi", False, str(error))
    return [BackendStatus("local", True, "one rank only"), status, _shared_memory_status(), _nccl_status()]


def _shared_memory_status() -> BackendStatus:
    from ..transport.shm.memfd import HostFile
    try:
        file = HostFile.make()
        try:
            file.take(4096)
        finally:
            file.close()
    except OSError as error:
        return BackendStatus("shared_memory", False, str(error))
    return BackendStatus("shared_memory", True, "among the ranks of a host, of all sizes")


def _nccl_status() -> BackendStatus:
    problem = why_no_cupy()
    if problem:
        return BackendStatus("nccl", False, f"cupy is missing: {problem}")
    from ..gpu.device import Device, gpu_count
    if not Device.nccl_version():
        return BackendStatus("nccl", False, f"cupy finds no NCCL ({pip_extra('gpu')})")
    if not gpu_count():
        return BackendStatus("nccl", False, "no GPU is visible")
    return BackendStatus("nccl", True, "tensors on GPUs")
