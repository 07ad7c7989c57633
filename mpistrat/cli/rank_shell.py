"""What a shell does on each rank before it becomes the command. So every command can be run. Pure.

- It has the rank print into files of its own, as horovodrun does: DIRECTORY/rank.R/stdout and stderr. It keeps mpirun's
  stderr open for the report of a rank that fails (process/report.py), which is for the summary.
- It prints a line that the rank starts, so that `mpistrat run` knows when all hosts have answered, and which process
  an elastic job waits for.

Called by `mpistrat run` and mpistrat.run.
"""

import os

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


def in_shell(command: tuple[str, ...], ranks: int, directory: str | None = None, is_announced: bool = False
             ) -> tuple[str, ...]:
    """Return a command that runs `command` on a rank.

    Args:
        ranks: How many there are. The numbers in the names of files have as many digits as the largest.
        directory: The directory, on each host; None: no files.
        is_announced: Whether the rank prints that it starts.
    """
    if directory is None and not is_announced:
        return command
    parts = [_RANK, *([_ANNOUNCE] if is_announced else []), 'exec "$@"' if directory is None else _FILES]
    places = () if directory is None else (os.path.abspath(directory), str(len(str(ranks - 1))))
    return "sh", "-c", "; ".join(parts), "sh", *places, *command
