"""Have each rank print into files of its own, as horovodrun does: DIRECTORY/rank.R/stdout and stderr. Pure.

A shell redirects the output before it becomes the command, so that every command can be run, and whatever it prints is
in the files. It keeps mpirun's stderr open for the report of a rank that fails (api/report.py), which is for the
summary. Called by `mpistrat run` and mpistrat.run.
"""

import os

from ..api.launch_env import RUN_REPORTS

REPORTS_DESCRIPTOR = 9  # Shells know descriptors of one digit.

# Open MPI's variable, MPICH's and Intel MPI's, and PMIx'.
_RANK = "${OMPI_COMM_WORLD_RANK-${PMI_RANK-$PMIX_RANK}}"
_SHELL = "; ".join((
    f'directory=$1/rank.$(printf %0$2d "{_RANK}")', 'shift 2', 'mkdir -p "$directory" || exit 2',
    f'[ -z "${RUN_REPORTS}" ] || export {RUN_REPORTS}="${RUN_REPORTS} {REPORTS_DESCRIPTOR}"',
    f'exec "$@" {REPORTS_DESCRIPTOR}>&2 >"$directory/stdout" 2>"$directory/stderr"'))


def into_files(command: tuple[str, ...], directory: str, ranks: int) -> tuple[str, ...]:
    """Return a command that runs `command` with the output of each rank in files.

    Args:
        command: The command of the ranks.
        directory: The directory, on each host.
        ranks: How many there are. The numbers in the names have as many digits as the largest.
    """
    return "sh", "-c", _SHELL, "sh", os.path.abspath(directory), str(len(str(ranks - 1))), *command
