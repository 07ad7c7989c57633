"""Python imports this when it starts on a rank of `mpistrat run`: the rank takes its share of the cores, and errors of
the script before init() are reported.

It leaves no trace: PYTHONPATH and sys.path are again what they were, and a sitecustomize of the user is imported.
mpistrat is imported only after an error, because it imports numpy, whose settings the script may want to change first.
"""

import importlib
import os
import runpy
import sys
from types import TracebackType

_HERE = os.path.dirname(os.path.abspath(__file__))
_PROCESS = os.getpid()


def _is_rank() -> bool:
    """Whether mpirun has started this process. mpirun itself may be a Python program, and must keep PYTHONPATH."""
    return any(name in os.environ for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"))


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """In place of sys.excepthook, until init()."""
    try:
        if os.getpid() != _PROCESS:  # A process that the script has forked is no rank.
            raise ImportError
        from mpistrat.api.abort import report_before_init
    except ImportError:
        sys.__excepthook__(kind, error, trace)
    else:
        report_before_init(kind, error, trace)


_report._mpistrat_before_init = True  # type: ignore[attr-defined]


def _restore_path() -> None:
    path = os.environ.get("PYTHONPATH", "")
    if path == _HERE:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = path.removeprefix(_HERE + os.pathsep)


def _take_cores() -> None:
    """Before a library is imported, which counts its threads by the cores."""
    try:
        runpy.run_path(os.path.join(_HERE, "..", "..", "core", "cores.py"))["take_share_at_start"](os.environ)
    except OSError:
        pass  # It may not be allowed; init() tries again, and logs why.


def _begin() -> None:
    sys.path[:] = [path for path in sys.path if path != _HERE]
    if _is_rank() and "_MPISTRAT_REPORTS" in os.environ:
        _restore_path()
        sys.excepthook = _report
        if "_MPISTRAT_CORES" in os.environ and os.environ.get("MPISTRAT_BIND") != "0":
            _take_cores()
    own = sys.modules.pop(__name__)
    try:
        importlib.import_module(__name__)  # the user's
    except ImportError as error:
        if error.name != __name__:
            raise
        sys.modules[__name__] = own


if __name__ == "sitecustomize":
    _begin()
