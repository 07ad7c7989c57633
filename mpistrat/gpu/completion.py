"""The check that a stream waits for the end of a collective on the GPU, so that the host need not wait.

A collective is then complete when it is enqueued, as in Horovod: https://github.com/horovod/horovod/pull/2963. Work
that should wait and does not would read wrong numbers. So the check comes first. Used within `GpuDevice.current()`.
"""

import numpy as np

from ..core.errors import EngineError
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import await_on_host

_COPIES = 40  # A stream that does not wait would overtake them.
LIMIT_S = 10.0  # for what a GPU does in milliseconds
_VALUE = 77


def late_copy(device: GpuDevice, target: int, between: int, source: int, nbytes: int, after: GpuEvent) -> GpuEvent:
    """Copy within the GPU, on a stream of ours and not before much other work there; return an event at the end.

    `target`, `between`, `source`: Addresses. `between` takes what that work writes.
    """
    ours = device.stream()
    device.wait(ours, after)
    for _ in range(_COPIES):
        device.copy(between, source, nbytes, ours)
    device.copy(target, between, nbytes, ours)
    return device.record(ours)


def check_waiting(device: GpuDevice, buffer: GpuArray) -> None:
    """Raise EngineError if work in a stream that waits for an event begins before the event. Local.

    `buffer`: GPU memory that nobody uses now. If it is too small, some is allocated.
    """
    nbytes, theirs = device.checked_bytes, device.stream()
    memory = buffer if buffer.nbytes >= 3 * nbytes else device.scratch(3 * nbytes)
    if memory is None:
        raise EngineError(f"the GPU has no memory left for a check that needs {3 * nbytes} bytes")
    given, read = device.pinned(nbytes), device.pinned(nbytes)
    given[:], read[:] = _VALUE, 0
    target, between, source = (memory.address + i * nbytes for i in range(3))
    device.copy(target, read.ctypes.data, nbytes, theirs)
    device.copy(source, given.ctypes.data, nbytes, theirs)
    end = late_copy(device, target, between, source, nbytes, device.record(theirs))
    device.wait(theirs, end)
    device.copy(read.ctypes.data, target, nbytes, theirs)
    for event in (device.record(theirs), end):  # Both use the memory.
        await_on_host(event, LIMIT_S)
    if not np.all(read == _VALUE):
        raise EngineError("a stream has read memory before the work that it should have waited for")
