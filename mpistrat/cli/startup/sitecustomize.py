"""Bind a rank to its share of the cores, and report errors of the script before init().

Python imports this module when it starts on a rank of `mpistrat run`. A rank that ends without init() prints a line. If
no rank has called init(), `mpistrat run` tells the user.

The module removes its directory from PYTHONPATH and sys.path, and imports a sitecustomize of the user. It imports
mpistrat only after an error, because mpistrat imports numpy, and the script may change settings of numpy first.
"""

import atexit
import contextlib
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PROCESS = os.getpid()
_WRAPPER_S = 1.0  # If child processes have used more CPU time, this process may only have started the script.


def _own(module: str) -> dict[str, Any]:
    """Run a file of mpistrat/process, and return its globals. Importing the module would import mpistrat and numpy."""
    return runpy.run_path(os.path.join(_HERE, "..", "..", "process", f"{module}.py"))


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an exception to `mpistrat run`. This function is sys.excepthook until init()."""
    try:
        if os.getpid() != _PROCESS:  # A process that the script has forked is not a rank.
            raise ImportError
        from mpistrat.process.abort import report_before_init
    except ImportError:
        sys.__excepthook__(kind, error, trace)
    else:
        report_before_init(kind, error, trace)


_report._mpistrat_before_init = True  # type: ignore[attr-defined]


def _say_without_init(rank: str, stderr: int, final: Callable[[], tuple[int, str] | None]) -> None:
    """Print that the rank ends without init(), unless MPI is loaded: then it called init(), or uses MPI directly.

    `stderr`: The descriptor that mpirun reads. `final`: Returns the exit code and the call of sys.exit.
    """
    is_wrapper = os.times().children_user > _WRAPPER_S
    if os.getpid() == _PROCESS and "mpi4py.MPI" not in sys.modules and not is_wrapper and sys.__stderr__ is not None:
        code, call = final() or (0, "")
        report = f"[mpistrat] rank {rank} on {os.uname().nodename} fails with exit code {code}:\n" \
            f"[mpistrat] rank {rank} > {call:.999}, before init()\n" if code else ""
        with contextlib.suppress(OSError, ValueError):  # stderr is closed, or has no reader.
            os.write(stderr, f"{report}[mpistrat] rank {rank} has ended without init()\n".encode())


def _take_cores(rank: str, place: tuple[int, int] | None) -> None:
    """Bind the rank to its cores, before libraries create a thread for each core. `place`: (local rank, local size)."""
    try:
        taken = _own("cores")["take_share_at_start"](place, os.environ)
    except OSError:
        return  # Binding may be forbidden. init() tries again, and logs the reason.
    if os.environ.get("_MPISTRAT_CORES") == "report" and taken and sys.stderr is not None:
        print(f"mpistrat: rank {rank} runs on CPUs {','.join(map(str, sorted(taken)))}", file=sys.stderr)


def _begin() -> None:
    sys.path[:] = [path for path in sys.path if path != _HERE]
    launchers = _own("launchers") if "_MPISTRAT_REPORTS" in os.environ else {}
    # mpirun itself may be a Python program, and must keep PYTHONPATH.
    launcher = launchers["launcher_of"](os.environ) if launchers else None
    if launcher is not None:
        rank = os.environ[launcher.rank]
        path = os.environ.get("PYTHONPATH", "")
        if path == _HERE:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path.removeprefix(_HERE + os.pathsep)
        sys.excepthook = _report
        if "_MPISTRAT_CORES" in os.environ and os.environ.get("MPISTRAT_BIND", "").lower() not in ("gpu", "none"):
            _take_cores(rank, launchers["local_rank"](os.environ))
        exit_code, number = _own("exit_code"), os.environ["_MPISTRAT_REPORTS"].partition(" ")[2]
        exit_code["note"]()
        # A wrapper may have closed the descriptor.
        stderr = int(number) if number and os.path.exists(f"/dev/fd/{number}") else 2
        atexit.register(_say_without_init, rank, stderr, exit_code["final"])
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)  # the user's sitecustomize
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


if __name__ == "sitecustomize":
    _begin()
