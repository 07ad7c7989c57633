"""Complete the command of the ranks: put Python before a script, and a script from stdin into the command.

mpirun passes its stdin to rank 0 alone. So with `python < train.py`, or a here-document, only rank 0 would get the
script. `mpistrat run` reads the script once, and all ranks, also on other hosts, get it by `python -c`.
"""

import getopt
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from ..core.errors import LaunchError
from .startup import is_python

EXAMPLE = "mpistrat run -np 2 python train.py"
_ANSWER_S = 20.0
# Ignores the current directory, which `python -c` puts on sys.path.
_LACKS_MPISTRAT = "import sys; from importlib.util import find_spec; sys.path[:] = filter(None, sys.path); " \
    "sys.exit(find_spec('mpistrat') is None)"
_MOST_BYTES = 128 * 1024 - 1  # Linux's limit for one argument (MAX_ARG_STRLEN, 32 pages).
# Python's options, as getopt expects them. A colon or an equals sign marks an option with a value.
_SHORT, _LONG = "bBc:dEhiIm:OPqRsStuvVW:xX:?", ("check-hash-based-pycs=",)
_NO_STDIN = {"-c", "-m", "-h", "-?", "-V"}  # With these Python reads no script from stdin.


def checked(command: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Check that the command exists, and put Python before a script.

    Raises LaunchError: There is no such command or script.
    """
    if not command:
        raise LaunchError(f"there is no command to run. Write the command last, for example: {EXAMPLE}")
    program = command[0]
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise LaunchError(f"{program}: no such file. Write the path of the script, for example: {EXAMPLE}")
        return (sys.executable, *command)
    if shutil.which(program, path=environ.get("PATH", os.defpath)) is None:
        raise LaunchError(f"{program}: no such command. Write a program or a .py file after the options, for example: "
                          f"{EXAMPLE}")
    return command


def other_python(program: str, environ: Mapping[str, str]) -> str:
    """Return a sentence if the Python that the name `program` finds is not mpistrat's, and lacks mpistrat; else "".

    The function may start that Python, to look for mpistrat.
    """
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None or os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable):
        return ""
    try:
        code = subprocess.run([found, "-c", _LACKS_MPISTRAT], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=dict(environ), timeout=_ANSWER_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if code != 1 else (
        f"{program} is {found} here, which has no mpistrat. Activate the environment of mpistrat, or write "
        f"{sys.executable} instead of {program}")


def with_text(command: tuple[str, ...], stdin: TextIO) -> tuple[str, ...]:
    """Put the script that Python would read from `stdin` into the command. Other commands are returned unchanged.

    Raises LaunchError: Python would be interactive, or the script is too long for a command.
    """
    if not command or not is_python(command):
        return command
    try:
        options, arguments = getopt.getopt(list(command[1:]), _SHORT, _LONG)
    except getopt.GetoptError:  # Options after -c or -m, or wrong ones, which Python will report.
        return command
    given = {option for option, _ in options}
    if given & _NO_STDIN or (arguments and arguments[0] not in ("-", "/dev/stdin")):
        return command
    if stdin.isatty() or "-i" in given:
        raise LaunchError(f"Python without a script is interactive, which is impossible on several ranks. Write a "
                          f"script, for example: {EXAMPLE}")
    content = stdin.buffer.read()
    if len(content) > _MOST_BYTES or b"\0" in content:
        raise LaunchError(f"the script on stdin has {len(content)} bytes, but may have {_MOST_BYTES} bytes of text. "
                          f"Write the script to a file: {EXAMPLE}")
    before = command[:len(command) - len(arguments)]
    return (*before, "-c", os.fsdecode(content), *arguments[1:])
