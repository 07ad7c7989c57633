"""What only loading the libraries can tell: `python -m mpistrat.cli.probe`, and `probe()`, which runs it.

An MPI library or a GPU driver that does not fit can hang or end the process that loads it. So a process of its own
does, under a time limit, and writes each answer as soon as it has it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 60.0
_MARK = "mpistrat-probe "  # MPI libraries print to stdout as well.


@dataclass(frozen=True)
class Findings:
    """What the probe found out. A part that it did not get to is None, and `failure` says why.

    `mpi` has mpi4py's version and either the library, its vendor and its thread level, or an error. `cupy` has either
    the number of GPUs and NCCL's version code, or an error; it is {} where cupy is not installed. `backends` has the
    name, availability and reason of each.
    """

    mpi: dict[str, Any] | None = None
    cupy: dict[str, Any] | None = None
    backends: list[dict[str, Any]] | None = None
    failure: str = ""


@dataclass
class _Answers:
    parts: dict[str, Any] = field(default_factory=dict)

    def read(self, output: str) -> None:
        for line in output.splitlines():
            if line.startswith(_MARK):
                self.parts.update(json.loads(line[len(_MARK):]))


def probe(timeout_s: float = TIMEOUT_S) -> Findings:
    """Look at the libraries from another process. Never raises for what it finds, and never hangs."""
    command = [sys.executable, "-m", "mpistrat.cli.probe"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
            failure = "" if process.returncode == 0 else _ending(process.returncode, err.decode(errors="replace"))
        except subprocess.TimeoutExpired:
            _kill_group(process)
            out, err = process.communicate()
            failure = f"loading the libraries took more than {timeout_s:g} s"
        except BaseException:
            _kill_group(process)
            raise
    answers = _Answers()
    answers.read(out.decode(errors="replace"))
    return Findings(**answers.parts, failure=failure)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(returncode: int, err: str) -> str:
    how = f"died of signal {-returncode}" if returncode < 0 else f"ended with code {returncode}"
    last = [line.strip() for line in err.splitlines() if line.strip()]
    return f"loading the libraries {how}" + (f": {last[-1][:200]}" if last else "")


def _say(**part: Any) -> None:
    print(_MARK + json.dumps(part), flush=True)


def _cupy() -> dict[str, Any]:
    try:
        import cupy
    except ImportError as error:
        return {} if error.name == "cupy" else {"error": str(error)}
    try:
        found = {"gpus": cupy.cuda.runtime.getDeviceCount()}
        from cupy.cuda import nccl
        found["nccl"] = nccl.get_version()
    except Exception as error:  # cupy raises its own kinds for a missing driver, and ImportError for a missing NCCL.
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


def _backends() -> list[dict[str, Any]]:
    from ..api.availability import backends
    return [{"name": b.name, "available": b.available, "reason": b.reason} for b in backends()]


if __name__ == "__main__":
    _say(cupy=_cupy())
    _say(mpi=_mpi())
    _say(backends=_backends())
