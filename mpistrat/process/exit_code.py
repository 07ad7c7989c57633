"""The exit code with which sys.exit() ends this process, for what runs at exit.

Python gives its exit handlers no exit code, and SystemExit does not reach sys.excepthook. A rank that other ranks wait
for has to end the job with its code, so sys.exit() is replaced by a function that raises an exception of a subclass:
when Python ends the process because of a SystemExit it reads `code`, and no Python code is on the stack then. An
exception that the script catches is not read in this way.
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
    """What sys.exit raises in the main thread. Its name, its pickle and its behaviour are those of the base class."""

    @property
    def code(self) -> Any:
        """The argument of sys.exit."""
        global _final
        status = _base_code.__get__(self)
        if sys._getframe().f_back is None:  # Python itself reads it, with no frame of a script around.
            _final = status
        return status

    @code.setter
    def code(self, value: object) -> None:
        _base_code.__set__(self, value)

    def __reduce__(self) -> tuple[type[builtins.SystemExit], tuple[object, ...]]:
        return builtins.SystemExit, self.args


def exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status). In the place of sys.exit after `note`."""
    # Python ignores a SystemExit of another thread if it is of the base class itself.
    if threading.current_thread() is not threading.main_thread():
        _previous(status)
    raise SystemExit(*(status if isinstance(status, tuple) else () if status is None else (status,)))


def note() -> None:
    """Make sys.exit raise what `final` recognizes. Further calls do nothing. Local."""
    global _previous, _is_noted
    if not _is_noted:
        _previous, sys.exit, _is_noted = sys.exit, exit, True


def final() -> tuple[int, str] | None:
    """Return the exit code, 1 to 255, and the call of sys.exit that ends this process with it.

    None if the process does not end, or ends for another reason, or with code 0.
    """
    code = 0 if _final is None else _final & 0xFF if isinstance(_final, int) else 1
    return (code, f"sys.exit({_final!r})") if code else None
