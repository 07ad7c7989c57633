"""One-shot all-reduce for small messages in shared memory: every rank reads all parts, and reduces all elements.

Small messages are dominated by Python call overhead (about 0.8 us per call with cold caches), so this takes as few
calls as possible. If all ranks have packed before they agree on the all-reduce, no rank waits for another afterwards.
Used by the engine's thread.
"""

from collections.abc import Sequence, Sized

import numpy as np

from ...core.arithmetic import Reduction, combine
from ...core.interfaces import Prepared
from ...core.memory import FusionBuffer
from ...core.packing import pack, segments, unpack
from ...core.tuning import SHM_LARGE_TENSOR_BYTES
from .segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory


class OneShot(Prepared):
    """One such all-reduce. It counts as one chunk of TwoShotData.

    Args:
        memory: The memory of the host, for its counters.
        parts: The memory into which each rank of the host packs.
        free_at: How many chunks all ranks must have consumed before that memory may be overwritten.
        number: How many chunks there were before.
        sources, targets, reduction: As in DataPlane.allreduce.
        elements: The elements of all sources.
    """

    __slots__ = ("_free_at", "_memory", "_number", "_parts")

    def __init__(self, memory: HostMemory, parts: Sequence[np.ndarray], free_at: int, number: int,
                 sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], elements: int, reduction: Reduction):
        super().__init__(sources, targets, reduction)
        self._memory, self._free_at, self._number = memory, free_at, number + 1
        self._parts = [part[:elements] for part in parts]

    def pack_ahead(self) -> None:
        """Pack, if the memory is free. Local, never waits."""
        if self._memory.have_all(self._free_at, CONSUMED):
            self._pack()

    def _pack(self) -> None:
        pack(self.sources, self._parts[self._memory.index], self.reduction.prescale)
        self.is_packed = True

    def finish(self, all_packed: bool, scratch: FusionBuffer) -> None:
        """Do the rest of the all-reduce. Collective. For `all_packed` see DataPlane.finish."""
        memory, targets, op, scale = self._memory, self.targets, self.reduction.op, self.reduction.scale
        if not all_packed:
            if not self.is_packed:
                memory.await_all(self._free_at, CONSUMED)
                self._pack()
            memory.post(self._number, PACKED)
            memory.await_all(self._number, PACKED)
        if len(targets) == 1:
            combine(self._parts, op, targets[0].reshape(-1), scale)
        elif are_large(self._parts[0].nbytes, targets):
            for elements, target in segments(targets):
                combine([part[elements] for part in self._parts], op, target, scale)
        else:
            result = scratch.view(self._parts[0].size, self._parts[0].dtype)
            combine(self._parts, op, result, scale)
            unpack(result, targets)
        memory.post(self._number, PACKED, CONSUMED, READY, UNPACKED)


def are_large(nbytes: int, tensors: Sized) -> bool:
    """Whether to reduce tensors of `nbytes` together one by one, and not as one packed array."""
    return nbytes >= len(tensors) * SHM_LARGE_TENSOR_BYTES
