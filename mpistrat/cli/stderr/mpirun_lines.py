"""What mpirun prints about the end of a process, as text and as data. Pure.

The texts are those of Open MPI 4.1 and 5.0 (between lines of dashes) and of MPICH 5.0, all on stderr. MPICH's frame of
"BAD TERMINATION" goes to stdout, which is not read.
"""

import re
from dataclasses import dataclass

RULE = re.compile(rb"-{60,}\s*$")  # the line before and after a text of Open MPI

_SIGNAL = re.compile(rb"process rank (\d+) with PID \d+ on node (\S+) exited on signal (\d+)")
_CODE = re.compile(rb"Process name: \[.*?,(\d+)\] Exit code: (\d+)")
_ABORT = re.compile(rb"MPI_ABORT was invoked on rank (\d+) .*?(?:errorcode|Errorcode:) (-?\d+)")
_HYDRA_ABORT = re.compile(rb"Abort\((-?\d+)\) on node \d+ \(rank (\d+) in comm \d+\): application called MPI_Abort")
_OTHERS = re.compile(rb'process rank (\d+) with PID \d+ on node (\S+) calling "abort"')
_CONSEQUENCE = b"a non-zero exit code. Per user-direction, the job has been aborted."
# A rank says so when an error in MPI ends it, for example when another rank has died, and its connection is closed.
_ERROR = re.compile(rb"\[\S+:\d+\] \*\*\* (?:An error occurred in |reported by process |on |Unknown error|MPI_ERR|"
                    rb"and MPI will try to terminate)")
# Open MPI prints a text once, and then a line that others have it too, with the name of the text.
_AGGREGATED = re.compile(rb"\[\S+\] (?:\d+ more process\w* ha\w+ sent help message help-mpi-api\.txt / mpi-abort|"
                         rb"Set MCA parameter \"orte_base_help_aggregate\" to 0 to see all help)")
# Open MPI 5 says so when it sends to a process that has just ended.
_UNREACHABLE = re.compile(rb"\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH in file \S+ at line \d+")


@dataclass(frozen=True)
class Ending:
    """How a rank has ended.

    Attributes:
        rank: Its rank.
        host: Its host, or "" if mpirun does not name it.
        code: Its exit code; None if a signal has ended it, or if mpirun does not say it.
        signal: The number of the signal that has ended it, or None.
    """

    rank: int
    host: str = ""
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True)
class Words:
    """A text of mpirun, or of MPI on a rank, about the end of a process.

    Attributes:
        text: As it was printed.
        ending: What it says; None if it only says that other processes were ended, or what error it was.
        is_error: Whether it says what error it was.
    """

    text: bytes
    ending: Ending | None = None
    is_error: bool = False


def understand(text: bytes) -> Words | None:
    """Return a text of mpirun as Words, or None if it is not about the end of a process.

    Args:
        text: A line, or the lines from a rule to the next rule, with both.
    """
    flat = b" ".join(text.split())
    match = _SIGNAL.search(flat)
    if match:
        return Words(text, Ending(int(match[1]), match[2].decode(errors="replace"), signal=int(match[3])))
    match = _CODE.search(flat) or _ABORT.search(flat)
    if match:
        return Words(text, Ending(int(match[1]), code=int(match[2])))
    match = _HYDRA_ABORT.match(flat)
    if match:
        return Words(text, Ending(int(match[2]), code=int(match[1])))
    match = _OTHERS.search(flat)
    if match:
        return Words(text, Ending(int(match[1]), match[2].decode(errors="replace")))
    if _CONSEQUENCE in flat or _AGGREGATED.match(flat) or _UNREACHABLE.match(flat):
        return Words(text)
    if _ERROR.match(flat):
        return Words(text, is_error=True)
    return None
