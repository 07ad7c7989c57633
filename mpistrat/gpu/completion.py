"""Checks that streams wait for events, so that the host need not wait.

A collective is then complete when it is enqueued, as in Horovod: https://github.com/horovod/horovod/pull/2963. Work
that should wait and does not would read wrong numbers. So the checks come first. Work that is over before it is raced
with proves nothing. So a check looks whether it still runs, and has a stream that waits for nothing beside it, which
must read too early. Used within `GpuDevice.current()`.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..core.errors import EngineError
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import await_on_host

LIMIT_S = 10.0  # for what a GPU does in milliseconds
_LEAST_WORK = 40  # Copies, or kernels of TensorFlow's. A stream that does not wait would overtake them.
_LONGEST_S = 1.0  # Seconds after which a check takes no more work.
_VALUE = 77


class RefutedError(EngineError):
    """A stream does not wait."""


class UnprovenError(EngineError):
    """It is not known whether a stream waits."""


class Race(NamedTuple):
    """What a check has found."""

    read: float  # By work that should wait.
    right: float  # What that must read.
    runs: bool  # Whether what it should wait for still ran when it was enqueued.
    unordered: float  # Read by work that waits for nothing.


def prove(race: Callable[[int], Race]) -> None:
    """Run a race, with twice as much work each time, until it proves something. Local; takes about a second at most.

    Args:
        race: Called with the amount of work, 40 or more pieces of a tenth of a millisecond or so.

    Raises:
        RefutedError: Work that should have waited has not.
        UnprovenError: The GPU was always too fast.
    """
    work, began = _LEAST_WORK, time.monotonic()
    while True:
        found = race(work)
        if found.read != found.right:
            raise RefutedError(f"memory was read before it was complete: {found.read:g} instead of {found.right:g}")
        if found.runs and found.unordered != found.right:
            return
        if time.monotonic() - began > _LONGEST_S:
            raise UnprovenError(f"{work} pieces of work were over before the GPU came to what should wait for them, "
                                "so it is not known whether that would wait")
        work *= 2


def late_copy(device: GpuDevice, target: int, between: int, source: int, nbytes: int, after: GpuEvent,
              copies: int) -> tuple[GpuEvent, np.ndarray, GpuEvent]:
    """Copy within the GPU, on a stream of ours and not before `copies` others there.

    `target`, `between`, `source`: Addresses. `between` takes what that work writes.

    Returns:
        An event at the end, the first four bytes of the target as a stream reads them that does not wait for that, and
        the event after which they are there.
    """
    ours, unordered, read = device.stream(), device.stream(), device.pinned(4)
    for stream in (ours, unordered):
        device.wait(stream, after)
    for _ in range(copies):
        device.copy(between, source, nbytes, ours)
    device.copy(target, between, nbytes, ours)
    device.copy(read.ctypes.data, target, 4, unordered)
    return device.record(ours), read, device.record(unordered)


def check_waiting(device: GpuDevice, buffer: GpuArray) -> None:
    """Raise as `prove` if work in a stream that waits for an event begins before the event. Local.

    `buffer`: GPU memory that nobody uses now. If it is too small, some is allocated.
    """
    nbytes, theirs = device.checked_bytes, device.stream()
    memory = buffer if buffer.nbytes >= 3 * nbytes else device.scratch(3 * nbytes)
    if memory is None:
        raise EngineError(f"the GPU has no memory left for a check that needs {3 * nbytes} bytes")
    given, read = device.pinned(nbytes), device.pinned(nbytes)
    target, between, source = (memory.address + i * nbytes for i in range(3))

    def race(work: int) -> Race:
        given[:], read[:] = _VALUE, 0
        device.copy(target, read.ctypes.data, nbytes, theirs)
        device.copy(source, given.ctypes.data, nbytes, theirs)
        end, early, early_end = late_copy(device, target, between, source, nbytes, device.record(theirs), work)
        device.wait(theirs, end)
        device.copy(read.ctypes.data, target, nbytes, theirs)
        runs = not end.done
        for event in (device.record(theirs), end, early_end):  # All use the memory.
            await_on_host(event, LIMIT_S)
        return Race(float(read.min()), _VALUE, runs, float(early[0]))

    prove(race)
