"""One-shot all-reduce for small messages in shared memory: every rank reads all parts, and reduces all elements.

Small messages are dominated by Python call overhead (about 0.8 us per call with cold caches), so this takes as few
calls as possible. If all ranks have packed before they agree on the all-reduce, no rank waits for another afterwards.
Used by the engine's thread.
"""

from collections.abc import Callable, Sequence, Sized

import numpy as np

from ...core.arithmetic import Reduction, combine
from ...core.interfaces import DataPlane, Prepared
from ...core.memory import FusionBuffer
from ...core.packing import pack, segments, unpack
from ...core.tuning import SHM_LARGE_TENSOR_BYTES
from .segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory


class OneShot(Prepared):
    """One such all-reduce. It counts as one chunk of TwoShotData.

    Args:
        memory: The memory of the host, for its counters.
        parts: The memory into which each rank of the host packs: a row of as many elements as the sources for each.
        free_at: How many chunks all ranks must have consumed before that memory may be overwritten.
        number: The number of the chunk.
        scratch: Memory of this rank.
        count: Counts the chunk, when the all-reduce is complete.
    """

    __slots__ = ("_count", "_free_at", "_memory", "_number", "_parts", "_scratch")

    def __init__(self, plane: DataPlane, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 reduction: Reduction, memory: HostMemory, parts: np.ndarray, free_at: int, number: int,
                 scratch: FusionBuffer, count: Callable[[], None]):
        super().__init__(plane, sources, targets, reduction)
        self._memory, self._parts, self._free_at, self._number = memory, parts, free_at, number
        self._scratch, self._count = scratch, count

    def pack_ahead(self) -> None:
        """Pack, if the memory is free. Local, never waits."""
        if not self.is_packed and self._memory.have_all(self._free_at, CONSUMED):
            pack(self.sources, self._parts[self._memory.index], self.reduction.prescale)
            self.is_packed = True

    def finish(self, all_packed: bool) -> None:
        """See Prepared."""
        memory, targets, op, scale = self._memory, self.targets, self.reduction.op, self.reduction.scale
        if not all_packed:
            if not self.is_packed:
                memory.await_all(self._free_at, CONSUMED)
                pack(self.sources, self._parts[memory.index], self.reduction.prescale)
            memory.post(self._number, PACKED)
            memory.await_all(self._number, PACKED)
        if len(targets) == 1:
            combine(self._parts, op, targets[0].reshape(-1), scale)
        elif are_large(self._parts[0].nbytes, targets):
            for elements, target in segments(targets):
                combine([part[elements] for part in self._parts], op, target, scale)
        else:
            result = self._scratch.view(self._parts[0].size, self._parts[0].dtype)
            combine(self._parts, op, result, scale)
            unpack(result, targets)
        memory.post(self._number, PACKED, CONSUMED, READY, UNPACKED)
        self._count()


def are_large(nbytes: int, tensors: Sized) -> bool:
    """Whether to reduce tensors of `nbytes` together one by one, and not as one packed array."""
    return nbytes >= len(tensors) * SHM_LARGE_TENSOR_BYTES
