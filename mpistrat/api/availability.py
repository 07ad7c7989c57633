"""Which backends can run in this process, for `mpistrat doctor`.

A check imports the dependencies of its backend: mpi4py, which loads an MPI library, or cupy, which is optional.
`mpistrat doctor` calls this module in the process that cli/probe.py starts.
"""

from dataclasses import dataclass

from ..core.errors import MpistratError
from ..core.install import pip_extra
from ..transport.mpi import mpi_library
from .tensors import why_no_cupy


@dataclass(frozen=True)
class Row:
    """A row of a table of `mpistrat doctor`, about one package, library or backend."""

    label: str  # The name of the item.
    text: str  # The version, or what is missing and how to install it. For a backend: "yes" or "no" with the reason.
    is_available: bool = True  # Whether the item can be used.
    needed: bool = False  # Whether training needs the item.


def backends() -> list[Row]:
    """Check every known backend. Local. Loads mpi4py with its MPI library, and cupy if it is installed."""
    return [_row("local", "", "one rank only"), _row("mpi", _why_no_mpi()),
            _row("shared_memory", why_no_shared_memory(), "among the ranks of a host, of all sizes"),
            _row("nccl", _why_no_nccl(), "tensors on GPUs")]


def _row(name: str, problem: str, purpose: str = "") -> Row:
    if problem:
        return Row(name, f"no: {problem}", is_available=False)
    return Row(name, f"yes ({purpose})" if purpose else "yes")


def _why_no_mpi() -> str:
    try:
        mpi_library.require_thread_level(mpi_library.load_mpi())
    except MpistratError as error:
        return str(error)
    return ""


def why_no_shared_memory() -> str:
    """Return why processes of this host cannot share memory, or "" if they can. Local."""
    from ..transport.memfd import HostFile
    try:
        file = HostFile.make()
        try:
            file.map(4096)
        finally:
            file.close()
    except OSError as error:
        return str(error)
    return ""


def _why_no_nccl() -> str:
    problem = why_no_cupy()
    if problem:
        return f"cupy is missing: {problem}"
    from ..gpu.device import Device, gpu_count
    if not Device.nccl_version():
        return f"cupy finds no NCCL ({pip_extra('gpu')})"
    return "" if gpu_count() else "no GPU is visible"
