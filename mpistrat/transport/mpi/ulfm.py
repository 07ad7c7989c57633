"""Communicators after the loss of ranks: the functions of ULFM, which Open MPI has from version 5 on.

They work if mpirun was started with `--with-ft ulfm`; otherwise a lost rank ends the job. Importing this module imports
mpi4py.MPI, as for the data plane.
"""

import ctypes
import functools
import logging
import time
from collections.abc import Iterable
from typing import Any

from mpi4py import MPI

from .peer_wait import never_free

logger = logging.getLogger(__name__)

_POLL_S = 0.001
_FINALIZED = 5  # OMPI_MPI_STATE_FINALIZE_COMPLETED, in Open MPI 3 to 5


@functools.cache
def is_fault_tolerant() -> bool:
    """Whether this job outlives the loss of a rank, and any thread may call MPI. Local."""
    try:
        is_enabled = ctypes.c_bool.in_dll(ctypes.CDLL(MPI.__file__), "ompi_ftmpi_enabled").value
    except (OSError, AttributeError, ValueError):
        return False
    return is_enabled and hasattr(MPI.Comm, "Shrink") and MPI.Query_thread() == MPI.THREAD_MULTIPLE


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """The ranks of `comm` that MPI knows to have failed. Local; any thread may call it."""
    # Lets MPI take in what it was told. With `comm` that would not happen once another rank has revoked it.
    MPI.COMM_SELF.Iprobe()
    failed = comm.Get_failed()
    everybody = comm.Get_group()
    try:
        return list(failed.Translate_ranks(list(range(failed.Get_size())), everybody))
    finally:
        everybody.Free()
        failed.Free()


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks of `comm` that are left, in their order. Collective over these.

    Collectives of `comm` that are under way fail on all of them.
    """
    comm.Revoke()
    return comm.Shrink()  # type: ignore[return-value]


def have_all(comm: MPI.Intracomm, is_well: bool) -> bool:
    """Whether `is_well` is true on all ranks, and none of them is lost. Collective; the same on all ranks."""
    try:
        return bool(comm.Agree(int(is_well)))
    except MPI.Exception:
        return False


def discard(surrendered: Iterable[Any], limit_s: float) -> None:
    """Free communicators some of whose ranks are lost, and end the requests on them. Local.

    The memory of requests that MPI has not ended within `limit_s` is never freed, since MPI may still use it.
    """
    things = list(surrendered)
    comms = [each for each in things if isinstance(each, MPI.Comm) and each != MPI.COMM_NULL]
    for comm in comms:
        comm.Revoke()
    until, left = time.monotonic() + limit_s, [each for each in things if isinstance(each, MPI.Request)]
    while left := [request for request in left if not _has_ended(request)]:
        if time.monotonic() >= until:
            logger.debug("%d requests do not end after the loss of ranks", len(left))
            never_free(left)
            break
        time.sleep(_POLL_S)
    for comm in comms:
        comm.Free()


def _has_ended(request: MPI.Request) -> bool:
    try:
        return request.Test()
    except MPI.Exception:
        return request == MPI.REQUEST_NULL


def skip_finalize() -> None:
    """Make this process end without MPI_Finalize, which may hang after the loss of ranks. MPI cannot be used any more.

    mpi4py, which calls it when Python has ended, asks MPI whether that was done already.
    """
    ctypes.c_int32.in_dll(ctypes.CDLL(MPI.__file__), "ompi_mpi_state").value = _FINALIZED
