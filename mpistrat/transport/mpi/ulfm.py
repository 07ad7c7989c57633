"""Communicators after the loss of ranks: the functions of ULFM, which Open MPI has from version 5 on.

The functions work if mpirun was started with `--with-ft ulfm`; otherwise a lost rank ends the job. Importing this
module imports mpi4py.MPI and so initialises MPI, see mpi_data.
"""

import ctypes
import functools
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from mpi4py import MPI

from .mpi_library import OPEN_MPI_FINALIZED, open_mpi_variable, ranks_in
from .requests import never_free

logger = logging.getLogger(__name__)

_POLL_S = 0.001


@functools.cache
def is_fault_tolerant() -> bool:
    """Return whether MPI survives the loss of a rank in this job, and any thread may call MPI. Local."""
    is_enabled = open_mpi_variable(MPI, ctypes.c_bool, "ompi_ftmpi_enabled")
    return (is_enabled is not None and is_enabled.value and hasattr(MPI.Comm, "Shrink")
            and MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def failed_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of `comm` that MPI knows to have failed. Local; any thread may call this function."""
    # Lets MPI process reports of failures. A probe of `comm` would not do so once another rank has revoked `comm`.
    MPI.COMM_SELF.Iprobe()
    failed = comm.Get_failed()
    everybody = comm.Get_group()
    try:
        return list(failed.Translate_ranks(list(range(failed.Get_size())), everybody))
    finally:
        everybody.Free()
        failed.Free()


class _Process(ctypes.Structure):  # pmix_proc_t
    _fields_ = [("nspace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Value(ctypes.Structure):  # pmix_value_t, whose union has three words
    _fields_ = [("type", ctypes.c_uint16), ("data", ctypes.c_void_p * 3)]


class _Info(ctypes.Structure):  # pmix_info_t
    _fields_ = [("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value)]


# Of pmix_common.h, whose numbers are the same in PMIx 3 to 6.
_TERMINATED, _AFFECTED, _TYPE_PROC, _RANGE_SESSION, _RANGE_PROCESS = -200, b"pmix.evproc", 22, 4, 7


def report_failed(comm: MPI.Comm, ranks: Sequence[int], to_all: bool) -> None:
    """Tell MPI that ranks of `comm` have ended. Local; any thread and several ranks may call it.

    MPI itself notices only killed processes. Without a report, MPI waits for ever for a rank that has exited with a
    code above 0, or whose host has stopped answering. A failure that MPI already knows of may be reported.

    `to_all`: Tell the MPI library of all ranks that the launcher reaches, not only the MPI library of this rank.
    """
    notify = _pmix_notify()
    if notify is None or not ranks:
        return
    launched = ranks_in(comm, MPI.COMM_WORLD)
    for rank in (launched[rank] for rank in ranks):
        process, info = _Process(os.environ["PMIX_NAMESPACE"].encode(), rank), (_Info * 1)()
        info[0].key, info[0].value.type, info[0].value.data[0] = _AFFECTED, _TYPE_PROC, ctypes.addressof(process)
        status = notify(_TERMINATED, ctypes.byref(process), _RANGE_SESSION if to_all else _RANGE_PROCESS, info, 1, None,
                        None)
        logger.debug("the end of rank %d of MPI_COMM_WORLD was reported: %d", rank, status)


@functools.cache
def _pmix_notify() -> Any:
    """Return the function PMIx_Notify_event of the PMIx library that MPI has loaded; None if MPI has loaded none."""
    with open("/proc/self/maps", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as file:
        paths = {line.split(maxsplit=5)[5].strip() for line in file if "/libpmix.so" in line}
    if len(paths) != 1 or "PMIX_NAMESPACE" not in os.environ:
        return None
    notify = ctypes.CDLL(paths.pop()).PMIx_Notify_event
    notify.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint8, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
                       ctypes.c_void_p]
    return notify


def survivors(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks of `comm`, in the same order. Collective over the survivors.

    Collectives of `comm` that are in flight fail on all survivors.
    """
    comm.Revoke()
    return comm.Shrink()  # type: ignore[return-value]


def have_all(comm: MPI.Intracomm, is_well: bool) -> bool:
    """Return whether `is_well` is true on all ranks and no rank is lost. Collective; the same result on all ranks."""
    try:
        return bool(comm.Agree(int(is_well)))
    except MPI.Exception:
        return False


def discard(revoked: Iterable[Any], limit_s: float) -> None:
    """Free communicators with lost ranks after their requests have ended. `revoked`: Communicators and requests. Local.

    The memory of requests that MPI has not ended within `limit_s` is never freed, because MPI may still use it.
    """
    things = list(revoked)
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
    """Make this process end without MPI_Finalize, which may hang after ranks are lost. MPI cannot be used afterwards.

    The function marks MPI as finalised, because mpi4py then does not call MPI_Finalize when Python exits.
    """
    state = open_mpi_variable(MPI, ctypes.c_int32, "ompi_mpi_state")
    assert state is not None  # Only Open MPI is fault tolerant.
    state.value = OPEN_MPI_FINALIZED
    # MPI's threads still run at exit, so no destructor of a library may: glibc calls first what was registered last.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):
        libc.on_exit(libc._exit, None)
