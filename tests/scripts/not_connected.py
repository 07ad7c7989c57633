"""init() where rank 1 cannot be connected to the ranks of its host: every rank says what it is told."""

from typing import Any

from mpi4py import MPI
from reporting import say

import mpistrat
from mpistrat.transport import host_link

host_link._LIMIT_S = 1.0
rank = MPI.COMM_WORLD.Get_rank()


def refuse(*_: Any) -> None:
    """As if another process had the first rank's place."""
    raise OSError("process 7 of user 8 answers in the place of rank 0")


if rank == 1:
    host_link.FdExchange.take = refuse  # type: ignore[method-assign]
try:
    mpistrat.init()
except mpistrat.MpistratError as error:
    say(f"{type(error).__name__}: {error}")
