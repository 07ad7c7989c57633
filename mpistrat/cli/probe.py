"""Load the MPI library and cupy in a separate process, and return their versions and errors.

A wrong MPI library or GPU driver can hang or kill the process that loads it. So `probe()` starts `python -m
mpistrat.cli.probe` with a time limit. The child process prints each finding as one line, as soon as it is known. Called
by `mpistrat doctor`.
"""

import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from ..api.common import Row, backends
from .child import Child
from .findings import say, understood
from .mpirun import with_home

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Findings:
    """The result of the probe. A field is None if the process ended before it printed that finding."""

    # "mpi4py" (version), and either "vendor", "version" and "threads" (thread level), or "error".
    mpi: dict[str, Any] | None = None
    # Either "gpus" (number) and "nccl" (version code) or "error"; {} if cupy is not installed.
    cupy: dict[str, Any] | None = None
    backends: list[Row] | None = None  # A row for each backend.
    failure: str = ""  # Why the process ended early; "" if it did not.


def probe(timeout_s: float = TIMEOUT_S) -> Findings:
    """Run the probe in a child process, for at most `timeout_s`. Errors of the libraries are part of the result."""
    with Child([sys.executable, "-m", "mpistrat.cli.probe"], with_home(os.environ)) as child:
        code = child.wait(time.monotonic() + timeout_s)
        out, err = child.said
    failure = f"loading the libraries took more than {timeout_s:g} s" if code is None else \
        _describe_exit(code, err) if code else ""
    parts: dict[str, Any] = {each["kind"]: each["found"] for each in understood(out)}
    if "backends" in parts:
        parts["backends"] = [Row(**each) for each in parts["backends"]]
    return Findings(**parts, failure=failure)


def _describe_exit(returncode: int, err: str) -> str:
    how = f"died of signal {-returncode}" if returncode < 0 else f"ended with code {returncode}"
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    return f"loading the libraries {how}" + (f": {lines[-1][:200]}" if lines else "")


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


if __name__ == "__main__":
    say("cupy", found=_cupy())
    say("mpi", found=_mpi())
    say("backends", found=[asdict(row) for row in backends()])
