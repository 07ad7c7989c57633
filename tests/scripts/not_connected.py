"""A job where rank 1 may not open the pipes of the other ranks: says what serves then, and what is logged."""

import numpy as np
from reporting import attempt, launched_rank, say_log

import mpistrat
from mpistrat.api import runtime
from mpistrat.transport.open_file import OpenFile

say_log()


def refuse(*_: object) -> int:
    """As the kernel does in another container."""
    raise PermissionError(13, "Permission denied", "/proc/1/fd/2")


if launched_rank() == 1:
    OpenFile.open = refuse  # type: ignore[method-assign]


def collectives() -> str:
    """Some collectives, and which backend serves."""
    mpistrat.init()
    for elements in (1, 300_000, 1, 1):
        array = np.full(elements, mpistrat.rank(), np.float32)
        assert (mpistrat.allreduce(array, op=mpistrat.Sum) == 3).all()
    assert mpistrat.broadcast_object(mpistrat.rank(), 2) == 2
    return f"{runtime.current().data_name} for {mpistrat.local_size()} ranks of a host"


attempt(collectives)
