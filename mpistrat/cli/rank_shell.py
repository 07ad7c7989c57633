"""What a shell does on each rank before it becomes the command. So every command can be run.

- It has the rank print into files of its own, as horovodrun does: DIRECTORY/rank.R/stdout and stderr. It keeps mpirun's
  stderr open for the report of a rank that fails (process/report.py), which is for the summary.
- It prints a line that the rank starts, so that `mpistrat run` knows when all hosts have answered, and which process
  an elastic job waits for.
- It gives rank 0 the stdin of `mpistrat run`.

Called by `mpistrat run` and mpistrat.run.
"""

import os
import shlex
import stat
from dataclasses import dataclass

from ..process.launch_env import RUN_REPORTS
from ..process.launchers import rank_in_shell
from ..process.report import STARTS

_REPORTS = 9  # the descriptor of mpirun's stderr; shells know descriptors of one digit
_RANK = f"rank={rank_in_shell()}"
_ANNOUNCE = f'echo "{STARTS.format(rank="$rank", pid="$$", host="$(uname -n)")}" >&2'
_FILES = "; ".join((
    'directory=$1/rank.$(printf %0$2d "$rank")', 'shift 2', 'mkdir -p "$directory" || exit 2',
    f'[ -z "${RUN_REPORTS}" ] || export {RUN_REPORTS}="${RUN_REPORTS} {_REPORTS}"',
    f'exec "$@" {_REPORTS}>&2 >"$directory/stdout" 2>"$directory/stderr"'))


@dataclass(frozen=True)
class Stdin:
    """A stdin for rank 0, which a process of this host has open. The other ranks have an empty one.

    The rank opens it itself, rather than read it through mpirun: Open MPI 5 never tells it that the end has come, and
    mpirun reads ahead, so that a loop `while read line; do mpistrat run ...; done` would lose its lines.
    """

    path: str  # The descriptor in /proc.
    link: str  # What it is, by which another host knows that the path is not meant for it.
    offset: int = 0  # Where a file is to be read from.

    @property
    def is_empty(self) -> bool:
        """Whether nothing can be read from it."""
        return self.link == os.devnull

    @property
    def opened(self) -> str:
        """The command of a shell that opens it."""
        seek = f"; dd bs=1 skip={self.offset} count=0 2>/dev/null" if self.offset else ""
        return f'if [ "$rank" = 0 ] && [ "$(readlink {self.path})" = {shlex.quote(self.link)} ]; then ' \
               f"exec <{self.path}{seek}; else exec <{os.devnull}; fi"


def own_stdin() -> Stdin | None:
    """Return the stdin of this process for rank 0; None if another process cannot open it: a terminal, which is for the
    programs in its foreground, and ranks are none of them; a socket.
    """
    kind = os.fstat(0).st_mode
    if os.isatty(0) or stat.S_ISSOCK(kind):
        return None
    path = f"/proc/{os.getpid()}/fd/0"
    return Stdin(path, os.readlink(path), os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(kind) else 0)


def in_shell(command: tuple[str, ...], ranks: int, directory: str | None = None, is_announced: bool = False,
             stdin: Stdin | None = None) -> tuple[str, ...]:
    """Return a command that runs `command` on a rank.

    Args:
        ranks: How many there are. The numbers in the names of files have as many digits as the largest.
        directory: The directory, on each host; None: no files.
        is_announced: Whether the rank prints that it starts.
        stdin: That of rank 0; None: what mpirun gives it.
    """
    if directory is None and not is_announced and stdin is None:
        return command
    parts = [_RANK, *([_ANNOUNCE] if is_announced else []), *([] if stdin is None else [stdin.opened]),
             'exec "$@"' if directory is None else _FILES]
    places = () if directory is None else (os.path.abspath(directory), str(len(str(ranks - 1))))
    return "sh", "-c", "; ".join(parts), "sh", *places, *command
