"""A shell on each rank prepares the rank, and then executes the command. So any program can be the command.

- The shell redirects the rank's output to files, as horovodrun does: DIRECTORY/rank.R/stdout and stderr. mpirun's
  stderr stays open for the report of a rank that fails (process/report.py), which the summary needs.
- The shell prints a line that the rank starts. With these lines `mpistrat run` knows when all hosts have answered, and
  which processes an elastic job waits for.
- The shell gives rank 0 the stdin of `mpistrat run`.

Called by `mpistrat run` and mpistrat.run.
"""

import os
import shlex
import stat
from dataclasses import dataclass

from ..process.launch_env import RUN_REPORTS
from ..process.launchers import rank_in_shell
from ..process.report import STARTS

_REPORTS = 9  # the file descriptor of mpirun's stderr; shells accept descriptors of one digit
_RANK = f"rank={rank_in_shell()}"
_ANNOUNCE = f'echo "{STARTS.format(rank="$rank", pid="$$", host="$(uname -n)")}" >&2'
_FILES = "; ".join((
    'directory=$1/rank.$(printf %0$2d "$rank")', 'shift 2', 'mkdir -p "$directory" || exit 2',
    f'[ -z "${RUN_REPORTS}" ] || export {RUN_REPORTS}="${RUN_REPORTS} {_REPORTS}"',
    f'exec "$@" {_REPORTS}>&2 >"$directory/stdout" 2>"$directory/stderr"'))


@dataclass(frozen=True)
class Stdin:
    """A stdin for rank 0, which a process of this host has open. The other ranks have an empty stdin.

    Rank 0 opens the file itself instead of reading through mpirun. Open MPI 5 never passes on the end of the file, and
    mpirun reads ahead, so that a loop `while read line; do mpistrat run ...; done` would lose lines.
    """

    path: str  # The path of the open file descriptor in /proc.
    link: str  # The target of `path`. On another host `path` has another target, so a rank there does not open it.
    offset: int = 0  # The position from which a file is read.

    @property
    def is_empty(self) -> bool:
        """Whether this stdin is /dev/null."""
        return self.link == os.devnull

    @property
    def opened(self) -> str:
        """The shell command that opens this stdin on rank 0, and /dev/null on other ranks."""
        seek = f"; dd bs=1 skip={self.offset} count=0 2>/dev/null" if self.offset else ""
        return f'if [ "$rank" = 0 ] && [ "$(readlink {self.path})" = {shlex.quote(self.link)} ]; then ' \
               f"exec <{self.path}{seek}; else exec <{os.devnull}; fi"


def own_stdin() -> Stdin | None:
    """Return the stdin of this process for rank 0, or None for a socket or a terminal. Another process cannot open a
    socket, and only programs in the foreground of a terminal may read from it, which ranks are not.
    """
    kind = os.fstat(0).st_mode
    if os.isatty(0) or stat.S_ISSOCK(kind):
        return None
    path = f"/proc/{os.getpid()}/fd/0"
    return Stdin(path, os.readlink(path), os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(kind) else 0)


def in_shell(command: tuple[str, ...], ranks: int, directory: str | None = None, is_announced: bool = False,
             stdin: Stdin | None = None) -> tuple[str, ...]:
    """Return a shell command that prepares a rank and executes `command`; `command` itself if nothing is to prepare.

    Args:
        ranks: Number of ranks. The rank numbers in file names are padded to the digits of the largest rank.
        directory: The directory for output files, on each host; None: the output is not redirected.
        is_announced: Whether the rank prints that it starts.
        stdin: The stdin of rank 0; None: the stdin that mpirun provides.
    """
    if directory is None and not is_announced and stdin is None:
        return command
    parts = [_RANK, *([_ANNOUNCE] if is_announced else []), *([] if stdin is None else [stdin.opened]),
             'exec "$@"' if directory is None else _FILES]
    places = () if directory is None else (os.path.abspath(directory), str(len(str(ranks - 1))))
    return "sh", "-c", "; ".join(parts), "sh", *places, *command
