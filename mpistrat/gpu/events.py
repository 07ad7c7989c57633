"""Events of CUDA by cupy: points in a stream, numbered in the order in which they are recorded.

Imports cupy, so only device.py imports this module. Any thread may use an Event.
"""

from collections.abc import Hashable
from itertools import count
from threading import Lock, get_ident

import cupy

from ..core.errors import EngineError
from .arrays import GpuStream

_NOT_READY = 600  # cudaErrorNotReady
_PER_THREAD = 2  # cudaStreamPerThread


class Recording:
    """Numbers the events of a device in the order in which they are recorded."""

    def __init__(self) -> None:
        self.lock, self.numbers = Lock(), count()


class Event:
    """A point in a stream. See arrays.GpuEvent."""

    def __init__(self, stream: GpuStream, recording: Recording):
        self.cupy_event = cupy.cuda.Event(disable_timing=True)
        self._stream = stream  # so that the address is that of no other stream while there is the event
        with recording.lock:
            self.cupy_event.record(stream)
            self.number = next(recording.numbers)
        # The per-thread default streams of all threads have the same address.
        self.stream: Hashable = (stream.ptr, get_ident() if stream.ptr == _PER_THREAD else 0)

    @property
    def done(self) -> bool:
        """Whether the stream has reached it. Raises EngineError if the GPU has failed."""
        status = cupy.cuda.runtime.eventQuery(self.cupy_event.ptr)
        if status not in (0, _NOT_READY):
            raise EngineError(f"the GPU has failed: {cupy.cuda.runtime.CUDARuntimeError(status)}")
        return bool(status == 0)
