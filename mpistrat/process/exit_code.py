"""The exit code with which sys.exit() ends this process, for exit handlers.

If a rank calls sys.exit() while other ranks wait for it, its exit handler ends the job with the same exit code. But
Python does not give the exit code to exit handlers, and does not call sys.excepthook for SystemExit. So sys.exit() is
replaced by a function that raises a subclass of SystemExit. If the exception ends the process, Python itself reads the
attribute `code` while no Python function runs, and thereby tells the code. If a script catches it, no such read occurs.
"""

import builtins
import sys
import threading
from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any, NoReturn

_base_code: GetSetDescriptorType = builtins.SystemExit.__dict__["code"]
_previous: Callable[..., NoReturn] = sys.exit
_is_noted = False
_final: object = None  # the status that Python has read


class SystemExit(builtins.SystemExit):
    """The exception of sys.exit in the main thread. Its name and its pickled form are those of the base class."""

    @property
    def code(self) -> Any:
        """The argument of sys.exit."""
        global _final
        status = _base_code.__get__(self)
        if sys._getframe().f_back is None:  # Python itself reads `code`, without a calling frame.
            _final = status
        return status

    @code.setter
    def code(self, value: object) -> None:
        _base_code.__set__(self, value)

    def __reduce__(self) -> tuple[type[builtins.SystemExit], tuple[object, ...]]:
        return builtins.SystemExit, self.args


def exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status). Replaces sys.exit after `note`."""
    # Python ignores a SystemExit of another thread if it is of the base class itself.
    if threading.current_thread() is not threading.main_thread():
        _previous(status)
    raise SystemExit(*(status if isinstance(status, tuple) else () if status is None else (status,)))


def note() -> None:
    """Replace sys.exit by `exit`, so that `final` can return the exit code. Later calls do nothing. Local."""
    global _previous, _is_noted
    if not _is_noted:
        _previous, sys.exit, _is_noted = sys.exit, exit, True


def final() -> tuple[int, str] | None:
    """Return the exit code (1 to 255) of the sys.exit() that ends this process, and the call as text.

    Return None if the process is not ending, or ends without sys.exit(), or ends with code 0.
    """
    code = 0 if _final is None else _final & 0xFF if isinstance(_final, int) else 1
    return (code, f"sys.exit({_final!r})") if code else None
