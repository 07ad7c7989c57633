"""The command of each rank: complete the user's command, and prepare the environment of the rank.

- `checked` puts the Python interpreter before a script.
- mpirun passes its stdin to rank 0 alone. So with `python < train.py`, or a here-document, only rank 0 would get the
  script. `with_text` reads the script once, and passes it to all ranks, also on other hosts, as `python -c SCRIPT`.
- `report_variables` makes a rank report errors before init(), such as a missing package. Python imports the module
  `sitecustomize` of cli/startup when it starts. Until init(), this module reports the errors.
- `in_shell` makes a shell prepare the rank, and then execute the command. So any program can be the command. The shell
  redirects the output of the rank to files, as horovodrun does: DIRECTORY/rank.R/stdout and stderr. The stderr of
  mpirun stays open, because a rank that fails prints its report there (process/report.py). The shell also prints a line
  when the rank starts. These lines tell `mpistrat run` when all hosts have answered, and which processes an elastic job
  waits for. The shell gives rank 0 the stdin of `mpistrat run`.

Called by `mpistrat run`, `mpistrat doctor` and mpistrat.run.
"""

import getopt
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from ..core.errors import LaunchError
from ..process.launch_env import RUN_REPORTS
from ..process.launchers import rank_in_shell
from ..process.report import STARTS, SUMMARY, TRACEBACK

# -- the command ------------------------------------------------------------------------------------------------------

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
    """Return the command, with Python in front of a .py file. Raises LaunchError: There is no such command or file."""
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
    """Return a warning if `program` on the PATH is a Python interpreter without mpistrat; else ""."""
    found = shutil.which(program, path=environ.get("PATH", os.defpath))
    if found is None or os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable):
        return ""
    try:
        code = subprocess.run([found, "-c", _LACKS_MPISTRAT], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=dict(environ), timeout=_ANSWER_S, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"{program} is {found} here, which has no mpistrat. Activate the environment of mpistrat, or write " \
        f"{sys.executable} instead of {program}" if code == 1 else ""


def is_python(command: Sequence[str]) -> bool:
    """Whether a command is a Python interpreter with its arguments."""
    return re.fullmatch(r"python[\d.]*", Path(command[0]).name) is not None


def with_text(command: tuple[str, ...], stdin: TextIO) -> tuple[str, ...]:
    """Read the script of a Python command from `stdin`, and put it after -c. Other commands are returned unchanged.

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
        raise LaunchError(f"the script on stdin has {len(content)} bytes; the limit is {_MOST_BYTES} bytes of text. "
                          f"Write the script to a file: {EXAMPLE}")
    before = command[:len(command) - len(arguments)]
    return (*before, "-c", os.fsdecode(content), *arguments[1:])


# -- variables for reports before init() ------------------------------------------------------------------------------

STARTUP = str(Path(__file__).parent / "startup")


def report_variables(command: Sequence[str], is_here: bool, environ: Mapping[str, str], is_whole: bool
                     ) -> dict[str, str]:
    """Return the variables that make ranks report errors before init(), to add to mpirun's environment `environ`.

    Args:
        is_here: Whether all ranks run on this host. If not, PYTHONPATH is changed only if `environ` contains it.
        is_whole: Whether ranks also print whole tracebacks.
    """
    added = {RUN_REPORTS: TRACEBACK if is_whole else SUMMARY}
    path = environ.get("PYTHONPATH")
    if is_python(command) and (is_here or path is not None):
        added["PYTHONPATH"] = STARTUP if path is None else STARTUP + os.pathsep + path
    return added


# -- the shell --------------------------------------------------------------------------------------------------------

_REPORTS = 9  # the file descriptor of mpirun's stderr; shells accept descriptors of one digit
_RANK = f"rank={rank_in_shell()}"
_ANNOUNCE = f'echo "{STARTS.format(rank="$rank", pid="$$", host="$(uname -n)")}" >&2'
_FILES = "; ".join((
    'directory=$1/rank.$(printf %0$2d "$rank")', 'shift 2', 'mkdir -p "$directory" || exit 2',
    f'[ -z "${RUN_REPORTS}" ] || export {RUN_REPORTS}="${RUN_REPORTS} {_REPORTS}"',
    f'exec "$@" {_REPORTS}>&2 >"$directory/stdout" 2>"$directory/stderr"'))


@dataclass(frozen=True)
class Stdin:
    """A file that a process of this host has open, and that rank 0 gets as stdin. Other ranks have an empty stdin.

    Rank 0 opens the file itself, because Open MPI 5 passes on the content of a file, but never its end. mpirun also
    reads ahead, so a loop `while read line; do mpistrat run ...; done` would lose lines.
    """

    path: str  # The path of the open file descriptor in /proc.
    link: str  # The target of `path`. On another host `path` has another target, so a rank there does not open it.
    offset: int = 0  # The position from which a file is read.

    @property
    def is_empty(self) -> bool:
        return self.link == os.devnull


def own_stdin() -> Stdin | None:
    """Return the stdin of this process, for rank 0; None for a socket or a terminal.

    Rank 0 cannot open the socket of another process. Only programs in the foreground may read from a terminal, and
    ranks are not in the foreground.
    """
    kind = os.fstat(0).st_mode
    if os.isatty(0) or stat.S_ISSOCK(kind):
        return None
    path = f"/proc/{os.getpid()}/fd/0"
    return Stdin(path, os.readlink(path), os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(kind) else 0)


def in_shell(command: tuple[str, ...], ranks: int, directory: str | None = None, is_announced: bool = False,
             stdin: Stdin | None = None) -> tuple[str, ...]:
    """Return a shell command that prepares a rank and executes `command`; or `command` if there is nothing to prepare.

    Args:
        ranks: Number of ranks. Rank numbers in file names have as many digits as the largest rank.
        directory: The directory for output files, on each host; None: the output is not redirected.
        is_announced: Whether the rank prints that it starts.
        stdin: The stdin of rank 0; None: the stdin that mpirun provides.
    """
    if directory is None and not is_announced and stdin is None:
        return command
    parts = [_RANK, *([_ANNOUNCE] if is_announced else [])]
    if stdin is not None:
        seek = f"; dd bs=1 skip={stdin.offset} count=0 2>/dev/null" if stdin.offset else ""
        parts.append(f'if [ "$rank" = 0 ] && [ "$(readlink {stdin.path})" = {shlex.quote(stdin.link)} ]; then '
                     f"exec <{stdin.path}{seek}; else exec <{os.devnull}; fi")
    parts.append('exec "$@"' if directory is None else _FILES)
    places = () if directory is None else (os.path.abspath(directory), str(len(str(ranks - 1))))
    return "sh", "-c", "; ".join(parts), "sh", *places, *command
