"""What NCCL's path must prove on the machine where it runs: known numbers when it is connected, then its first buckets.

Streams, drivers, NCCL and the way between two GPUs may be wrong where no test has been: a stream that does not wait, or
reads from the other GPU that an IOMMU garbles. Used by the engine's thread, within `GpuDevice.current()`. All methods
are collective.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.arithmetic import Reduction, Scale
from ..core.errors import EngineError
from ..core.interfaces import DataPlane
from ..core.request import ReduceOp
from .arrays import GpuArray, GpuDevice, GpuEvent
from .backend import await_on_host
from .completion import LIMIT_S
from .copy.plan import fused_offsets
from .nccl.communicators import Exchange
from .nccl.data import NcclData
from .staged import StagedData

_SMALL, _LARGE = 130, 20_001  # More tensors than a launch of the copy kernel takes; elements, more than a block.
_LATE = 40  # How often the numbers are written.
_SHADOWS = 2  # The executions of each kind of bucket that are done on the CPU, too.
_STEPS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}

Kind = tuple[str, ReduceOp, str]  # dtype, operation, dtype on the wire


class Shadow(NamedTuple):
    """A bucket that is reduced twice."""

    names: Sequence[str]  # of the tensors
    expected: list[np.ndarray]
    targets: Sequence[int]
    limit: float  # How far the results may be from each other.


class Proof:
    """What the ranks compare.

    Args:
        staged: Copies to the host.
        host: Reduces there.
        exchange: An exchange among these ranks.
    """

    def __init__(self, device: GpuDevice, staged: StagedData, host: DataPlane, exchange: Exchange, rank: int,
                 size: int):
        self._device, self._staged, self._host, self._exchange = device, staged, host, exchange
        self._rank, self._size = rank, size
        self._done: Counter[Kind] = Counter()

    # -- known numbers ------------------------------------------------------------------------------------------------

    def refusals(self, nccl: NcclData) -> str:
        """Reduce known numbers; say which ranks got wrong ones, and the first of these; "": all are right."""
        try:
            # All of them, since the other ranks do them.
            found = [self._wrong(nccl, np.dtype(dtype), divisor) for dtype in (np.float32, np.float16)
                     for divisor in (1, self._size)]
            own = next(filter(None, found), "")
        except Exception as error:  # Sent to the other ranks, which wait for this rank.
            own = f"{type(error).__name__}: {error}"
        return _listed(self._exchange(own))

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

    def shadow(self, kind: Kind, names: Sequence[str], arrays: Sequence[GpuArray], sources: Sequence[int],
               targets: Sequence[int], reduction: Reduction) -> Shadow | None:
        """Reduce a bucket on the CPU, before that on the GPU, which may overwrite it; None: its kind is trusted.

        Waits for the contents.
        """
        if self._done[kind] >= _SHADOWS:
            return None
        self._done[kind] += 1
        fetched = [self._staged.fetched(source, array.nbytes).view(array.dtype)
                   for source, array in zip(sources, arrays, strict=True)]
        largest = max(self._exchange(max(float(np.abs(_wide(each)).max(initial=0)) for each in fetched)))
        scale = abs(reduction.prescale * reduction.scale.factor / reduction.scale.divisor)
        step = _STEPS.get(kind[2] or kind[0].replace("complex64", "float32").replace("complex128", "float64"), 0.0)
        expected = [np.empty_like(each) for each in fetched]
        self._host.allreduce(fetched, expected, reduction)
        after = abs(reduction.scale.factor / reduction.scale.divisor)  # It also scales what the wire has rounded.
        least = 1e-4 * max(after, 1.0)
        return Shadow(names, expected, targets, step * (self._size + 2) * self._size * max(largest * scale, least))

    def compare(self, shadows: Sequence[Shadow], ends: Sequence[GpuEvent]) -> None:
        """Compare the results of the GPU, which are there after `ends`. Waits for it.

        Raises EngineError: They differ on a rank; on all ranks.
        """
        self._staged.wait_for(ends)
        own = next(filter(None, map(self._difference, shadows)), "")
        different = _listed(self._exchange(own))
        if different:
            raise EngineError(f"NCCL has not given the results of the same reduction on the CPU: {different}. Look for "
                              "errors of the GPUs and of the way between them (NCCL_P2P_DISABLE=1 avoids that), or "
                              "reduce through host memory by MPISTRAT_GPU_OPERATIONS=staged. MPISTRAT_DISABLE=shadow "
                              "does not look.")

    def _difference(self, shadow: Shadow) -> str:
        for name, expected, target in zip(shadow.names, shadow.expected, shadow.targets, strict=True):
            found = self._staged.fetched(target, expected.nbytes).view(expected.dtype)
            with np.errstate(all="ignore"):
                far = np.abs(_wide(found) - _wide(expected)) > shadow.limit
            # Half precision overflows in other places.
            wrong = np.flatnonzero(far & np.isfinite(_wide(found)) & np.isfinite(_wide(expected)))
            if wrong.size:
                return f"{name}, element {wrong[0]}: {found[wrong[0]]} instead of {expected[wrong[0]]}"
        return ""


def _known(places: np.ndarray, rank: int) -> np.ndarray:
    """Whole numbers whose sum over a thousand ranks is exact in half precision."""
    return np.asarray((places * 7 + rank * 3) % 5 - 2.0)


def _wide(values: np.ndarray) -> np.ndarray:
    return values if values.dtype.kind == "c" else values.astype(np.float64)


def _listed(texts: Sequence[str]) -> str:
    return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
