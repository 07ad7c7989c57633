"""NCCL by cupy: its version, ids, groups and communicators. Its errors have NCCL's own message.

Imports cupy, so only device.py imports this module. One thread at a time may call a Communicator.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from cupy.cuda import nccl

from ..core.errors import EngineError
from .nccl_types import RESULTS


def version() -> int:
    """NCCL's version code (22805 is 2.28.5); 0 if cupy was built without NCCL, or cannot load it."""
    return int(nccl.get_version()) if nccl.available else 0


def unique_id() -> bytes | tuple[int, ...]:
    """A new id for a communicator, made by one rank for all: bytes, or a tuple before cupy 14."""
    made: bytes | tuple[int, ...] = nccl.get_unique_id()
    return made


@contextmanager
def group() -> Iterator[None]:
    """A context in which NCCL's operations are enqueued as one."""
    with explained("a group"):
        nccl.groupStart()
        try:
            yield
        finally:
            nccl.groupEnd()


class Communicator:
    """cupy's NcclCommunicator, with all its methods. Their errors become EngineErrors with NCCL's own message.

    Implements nccl_types.NcclCommunicator. Making one is collective, and waits for all ranks. One thread calls its
    methods. Another thread may call `revoke` and `abort` meanwhile: then the call that waits in NCCL returns, and no
    later call begins. ncclCommAbort frees the communicator. So if NCCL has ncclCommRevoke, `revoke` is called first,
    and the waiting call is given time to return. (cupy forgets NCCL's communicator only when ncclCommAbort has
    returned. Without the flag a call that begins in the meantime would use freed memory.) cupy's calls release the lock
    of Python's interpreter, so that another thread can run.
    """

    def __init__(self, size: int, unique_id: bytes | tuple[int, ...], rank: int):
        with explained(f"connecting rank {rank} of {size}"):
            self._cupy_communicator = nccl.NcclCommunicator(size, unique_id, rank)
        self._rank, self._lock, self._is_ended, self._is_aborted = rank, Lock(), False, False

    def revoke(self) -> bool:
        """Make the call that waits in NCCL return, and free nothing. Any thread may call it.

        Returns:
            False if this version of NCCL has no ncclCommRevoke, or an abort has begun.
        """
        try:
            comm_revoke = ctypes.CDLL("libnccl.so.2").ncclCommRevoke
        except (OSError, AttributeError):
            return False
        comm_revoke.argtypes = ctypes.c_void_p, ctypes.c_int
        with self._lock:
            if self._is_ended:
                return False
            self._is_ended = True
        return bool(comm_revoke(self._cupy_communicator.comm, 0) == 0)

    def abort(self) -> None:
        """End all work of the communicator, and free it. May be called twice, and by any thread."""
        with self._lock:
            is_first, self._is_aborted, self._is_ended = not self._is_aborted, True, True
        if is_first:
            with explained(f"abort on rank {self._rank}"):
                self._cupy_communicator.abort()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cupy_communicator, name)

        def call(*arguments: Any) -> Any:
            if self._is_ended:
                raise EngineError(f"NCCL's communicator was aborted before {name} on rank {self._rank}.")
            with explained(f"{name} on rank {self._rank}"):
                return method(*arguments)

        setattr(self, name, call)  # so that later calls bypass __getattr__
        return call


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """A context that turns NCCL's errors into EngineErrors with NCCL's own message."""
    try:
        yield
    except nccl.NcclError as error:
        raise EngineError(f"NCCL has failed ({doing}): {error}. {last_error()}".rstrip(". ") + ".") from error
    except KeyError as error:
        number = error.args[0] if error.args else None
        if number not in RESULTS:
            raise
        raise EngineError(f"NCCL has failed ({doing}): {RESULTS[number]}. {last_error()}".rstrip(". ") + ".") from error


def last_error() -> str:
    """NCCL's message on its latest error in this process; "" if it is not available."""
    try:
        get_last_error = ctypes.CDLL("libnccl.so.2").ncclGetLastError
    except (OSError, AttributeError):
        return ""
    get_last_error.restype, get_last_error.argtypes = ctypes.c_char_p, (ctypes.c_void_p,)
    return (get_last_error(None) or b"").decode(errors="replace")
