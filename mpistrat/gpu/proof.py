"""Checks, in each job, that CUDA streams wait, that NCCL sums right, and that its first results agree with the CPU's.

Streams, drivers, NCCL and the link between two GPUs may be faulty on untested machines: a stream may fail to wait, or
an IOMMU may corrupt reads from the other GPU. Call the functions within `GpuDevice.current()`.

A handle is complete when its work is enqueued, as in Horovod: https://github.com/horovod/horovod/pull/2963. A stream
that does not wait would therefore read wrong numbers. A check of a stream counts only if the awaited work still runs
when the stream begins to wait. A second stream, which does not wait, must then read the old numbers.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..core.arithmetic import Reduction, Scale
from ..core.errors import EngineError
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp
from ..core.topology import Topology
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import StagedData, await_on_host
from .connect import Exchange, listed
from .copy_kernel import fused_offsets
from .nccl_data import NcclData

LIMIT_S = 10.0  # for work that takes a GPU milliseconds
_LEAST_WORK = 40  # Copies, or kernels of TensorFlow. A stream that does not wait would overtake them.
_LONGEST_S = 1.0  # Seconds after which a check takes no more work.
_VALUE = 77
_SMALL, _LARGE = 130, 20_001  # More tensors than a launch of the copy kernel takes; elements, more than a block.
_LATE = 40  # How often the numbers are written.
_SHADOWS = 2  # The executions of each kind of bucket that are done on the CPU, too.
_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
_LARGEST = {"float16": 65504.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1e308}

Kind = tuple[str, ReduceOp, str]  # dtype, operation, dtype on the wire

# -- that streams wait ------------------------------------------------------------------------------------------------


class RefutedError(EngineError):
    """A stream has not waited: its work has read memory before the awaited work was complete."""


class UnprovenError(EngineError):
    """A check of a stream has no result, because the awaited work was always complete too early."""


def one_line(error: Exception) -> str:
    """Return the text of an error for a log message: one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]


class Race(NamedTuple):
    """The findings of one race between work and a stream that should wait for the work."""

    read: float  # The number that was read by work that should wait.
    right: float  # The number that this work must read.
    runs: bool  # Whether the awaited work still ran when the waiting work was enqueued.
    unordered: float  # The number that was read by work that waits for nothing.


def prove(race: Callable[[int], Race]) -> None:
    """Repeat a race until it proves that a stream waits. Raise RefutedError or UnprovenError if it does not. Local.

    `race`: Gets the number of copies or kernels that the stream should wait for: 40, and twice as many each time. No
    race starts later than a second after the first one.
    """
    work, began = _LEAST_WORK, time.monotonic()
    while True:
        found = race(work)
        if found.read != found.right:
            raise RefutedError(f"a stream read memory before it was written: {found.read:g} instead of {found.right:g}")
        if found.runs and found.unordered != found.right:
            return
        if time.monotonic() - began > _LONGEST_S:
            raise UnprovenError(f"the check proves nothing, because the GPU finished {work} steps of work too early")
        work *= 2


def late_copy(device: GpuDevice, target: int, between: int, source: int, nbytes: int, after: GpuEvent,
              copies: int) -> tuple[GpuEvent, np.ndarray, GpuEvent]:
    """Copy `source` to `between`, `copies` times, and then `between` to `target`, on a new stream. Only enqueues.

    `target`, `between`, `source`: Addresses of GPU memory. `after`: An event that the new stream waits for.

    Returns:
        The event at the end of these copies; an array that gets the first four bytes of `target` from a second stream,
        which does not wait for these copies; and the event after which the array has the bytes.
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
    """Check that a stream begins its work only after an event that it waits for. Raise EngineError if not. Local.

    `buffer`: GPU memory that is not in use. If it is too small, the check allocates memory.
    """
    nbytes, theirs = device.checked_bytes, device.stream()
    memory = buffer if buffer.nbytes >= 3 * nbytes else device.scratch(3 * nbytes)
    if memory is None:
        raise EngineError(f"the check of CUDA streams needs {3 * nbytes} bytes of GPU memory, and not enough is free")
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


# -- that numbers are right -------------------------------------------------------------------------------------------


class Shadow(NamedTuple):
    """The result of the CPU for one tensor, to be compared with the result of the GPU."""

    name: str
    expected: np.ndarray
    target: int
    limit: float  # How far the results may be from each other.
    is_finite: bool  # Whether the sum cannot overflow, so that GPU and CPU agree on results that are not finite.


class Proof:
    """Compares results of NCCL with right results. Only the engine's thread uses it. All methods are collective.

    `staged` copies tensors to the host, and `host` reduces them there.
    """

    def __init__(self, device: GpuDevice, staged: StagedData, host: DataPlane, exchange: Exchange, topology: Topology):
        self._device, self._staged, self._host, self._exchange = device, staged, host, exchange
        self._rank, self._size = topology.rank, topology.size
        self._done: Counter[Kind] = Counter()
        self._shadows: list[Shadow] = []  # of the collectives that are being enqueued

    # -- known numbers ------------------------------------------------------------------------------------------------

    def refusals(self, nccl: NcclData) -> str:
        """Reduce known numbers by NCCL. Return a text with the first wrong result of each rank; "" if all are right."""
        try:
            # All four reductions, since the other ranks take part in each of them.
            found = [self._wrong(nccl, np.dtype(dtype), divisor) for dtype in (np.float32, np.float16)
                     for divisor in (1, self._size)]
            own = next(filter(None, found), "")
        except Exception as error:  # Sent to the other ranks, which wait for this rank.
            own = f"{type(error).__name__}: {error}"
        return listed(self._exchange(own))

    def _wrong(self, nccl: NcclData, dtype: np.dtype, divisor: int) -> str:
        # Not more than half of a small fusion buffer.
        counts = [1 + i % 7 for i in range(_SMALL)] + [min(_LARGE, nccl.buffer_bytes // 16)]
        starts, total = fused_offsets(counts, dtype.itemsize)
        places = np.arange(total)
        given, read = (self._device.pinned(total * dtype.itemsize).view(dtype) for _ in range(2))
        given[:] = _known(places, self._rank)
        read[:] = np.nan
        memory = self._device.scratch(2 * total * dtype.itemsize)
        if memory is None:
            return "the GPU has no memory left"
        source, target = memory.address, memory.address + total * dtype.itemsize
        writer, reader = self._device.stream(), self._device.stream()
        self._device.copy(target, read.ctypes.data, read.nbytes, writer)
        for _ in range(_LATE):
            self._device.copy(source, given.ctypes.data, given.nbytes, writer)
        arrays = [GpuArray(source + start * dtype.itemsize, (count,), dtype, memory)
                  for start, count in zip(starts, counts, strict=True)]
        nccl.wait_for([self._device.record(writer)])
        nccl.reducer(arrays, Reduction(ReduceOp.SUM, scale=Scale(divisor=divisor)))(
            [array.address for array in arrays], [array.address - source + target for array in arrays])
        for end in nccl.finish():
            self._device.wait(reader, end)
        self._device.copy(read.ctypes.data, target, read.nbytes, reader)
        await_on_host(self._device.record(reader), LIMIT_S)
        expected = np.zeros(total)
        for rank in range(self._size):
            expected += _known(places, rank) / divisor
        limit = 0.0 if divisor == 1 else 8 * _STEPS[dtype.name]  # NCCL divides before it adds up.
        for number, (start, count) in enumerate(zip(starts, counts, strict=True)):
            wrong = np.flatnonzero(~(np.abs(read[start:start + count] - expected[start:start + count]) <= limit))
            if wrong.size:
                place = start + int(wrong[0])
                return (f"{'sum' if divisor == 1 else 'average'} of {dtype}: tensor {number}, element {wrong[0]} is "
                        f"{read[place]:g} instead of {expected[place]:g}")
        return ""

    # -- the first buckets --------------------------------------------------------------------------------------------

    def trusts(self, kind: Kind, bucket: Sequence[tuple[str, GpuArray, int]], reduction: Reduction) -> bool:
        """Return whether NCCL is trusted with this `kind`: whether its results for two buckets were checked before.

        If not, this also reduces `bucket` on the CPU, for `compare`. `bucket`: (name, tensor, address of the result).
        """
        if self._done[kind] >= _SHADOWS:
            return True
        self._done[kind] += 1
        fetched = [self._staged.fetched(array.address, array.nbytes).view(array.dtype) for _, array, _ in bucket]
        largest = max(self._exchange(max(_largest(each) for each in fetched)))
        after = abs(reduction.scale.factor / reduction.scale.divisor)  # This also scales the rounding on the wire.
        sent = kind[2] or {"complex64": "float32", "complex128": "float64"}.get(kind[0], kind[0])
        # Sums near the largest number overflow, or not, by the order of the ranks. NCCL's minimum and maximum may leave
        # out NaN.
        is_finite = reduction.op is ReduceOp.SUM and \
            self._size * largest * abs(reduction.prescale) * max(after, 1.0) < _LARGEST.get(sent, np.inf)
        expected = [np.empty_like(each) for each in fetched]
        self._host.allreduce(fetched, expected, reduction)
        limit = _STEPS.get(sent, 0.0) * (self._size + 2) * self._size * max(largest * abs(reduction.prescale) * after,
                                                                           1e-4 * max(after, 1.0))
        self._shadows += [Shadow(name, result, target, limit, is_finite)
                          for (name, _, target), result in zip(bucket, expected, strict=True)]
        return False

    def compare(self, ends: Sequence[GpuEvent]) -> None:
        """Wait for the events `ends`, and compare the GPU's results with those that `trusts` has computed on the CPU.

        Does nothing if `trusts` has computed no results. Raises EngineError on all ranks: Results differ on any rank.
        """
        if not self._shadows:
            return
        shadows, self._shadows = self._shadows, []
        self._staged.wait_for(ends)
        own = next(filter(None, map(self._difference, shadows)), "")
        if different := listed(self._exchange(own)):
            raise EngineError(f"NCCL's results differ from the same reduction on the CPU: {different}. Check the GPUs "
                              "and the links between them (NCCL_P2P_DISABLE=1 avoids these links), or set "
                              "MPISTRAT_GPU_OPERATIONS=staged to reduce through host memory. MPISTRAT_DISABLE=shadow "
                              "switches this check off.")

    def _difference(self, shadow: Shadow) -> str:
        expected = shadow.expected
        found = self._staged.fetched(shadow.target, expected.nbytes).view(expected.dtype)
        with np.errstate(all="ignore"):
            here, there = _wide(found), _wide(expected)
            is_near = (np.abs(here - there) <= shadow.limit) | (here == there) | (np.isnan(here) & np.isnan(there))
        if not shadow.is_finite:
            is_near |= ~(np.isfinite(here) & np.isfinite(there))
        wrong = np.flatnonzero(~is_near)
        if not wrong.size:
            return ""
        return f"{shadow.name}, element {wrong[0]}: {found.flat[wrong[0]]} instead of {expected.flat[wrong[0]]}"


def _known(places: np.ndarray, rank: int) -> np.ndarray:
    """Return the test numbers of `rank` at the indices `places`. Sums over 1,000 ranks are exact in half precision."""
    return np.asarray((places * 7 + rank * 3) % 5 - 2.0)


def _largest(values: np.ndarray) -> float:
    """Return the largest finite absolute value in `values`; 0 if there is none."""
    absolute = np.abs(_wide(values))
    return float(absolute.max(initial=0, where=np.isfinite(absolute)))


def _wide(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind == "c" else values.astype(np.float64)
