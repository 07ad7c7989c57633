"""An all-reduce through shared memory that is small enough to be done at once, and of which every rank reduces all.

It does what SharedMemoryData does in chunks, in as few steps as it takes: the time of a small all-reduce is that of
Python's calls, 0.8 us each when the processor has last run something else. Where all ranks have packed before they
agreed on it, nobody waits for anybody once they have.
"""

from collections.abc import Sequence, Sized

import numpy as np

from ...core.arithmetic import Reduction, combine
from ...core.interfaces import Prepared
from ...core.memory import FusionBuffer
from ...core.packing import join, pieces, split
from .segment import CONSUMED, PACKED, READY, UNPACKED, HostMemory

# Tensors of this size on average are reduced one by one to where the result goes; smaller ones as one, and then copied.
_PIECE_BYTES = 32 * 1024


class OneShot(Prepared):
    """One such all-reduce. To the counters it is a chunk like any other.

    Args:
        memory: Has the counters.
        parts: For each rank of the host, the memory that it packs into.
        free_at: How many chunks must be consumed before that may be written to.
        number: How many chunks there were before.
        sources, targets, reduction: As in DataPlane.allreduce.
        elements: Of all sources.
    """

    __slots__ = ("_free_at", "_memory", "_number", "_parts")

    def __init__(self, memory: HostMemory, parts: Sequence[np.ndarray], free_at: int, number: int,
                 sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], elements: int, reduction: Reduction):
        super().__init__(sources, targets, reduction)
        self._memory, self._free_at, self._number = memory, free_at, number + 1
        self._parts = [part[:elements] for part in parts]

    def pack_ahead(self) -> None:
        """Pack, if there is room. Local."""
        if self._memory.have_all(CONSUMED, self._free_at):
            self._pack()

    def _pack(self) -> None:
        join(self.sources, self._parts[self._memory.index], self.reduction.prescale)
        self.is_packed = True

    def finish(self, all_packed: bool, scratch: FusionBuffer) -> None:
        """Do the rest. Collective; `all_packed` as in DataPlane.finish."""
        memory, targets, op, scale = self._memory, self.targets, self.reduction.op, self.reduction.scale
        if not all_packed:
            if not self.is_packed:
                memory.await_all(CONSUMED, self._free_at)
                self._pack()
            memory.post(self._number, PACKED)
            memory.await_all(PACKED, self._number)
        if len(targets) == 1:
            combine(self._parts, op, targets[0].reshape(-1), scale)
        elif are_large(self._parts[0].nbytes, targets):
            for here, piece in pieces(targets):
                combine([part[here] for part in self._parts], op, piece, scale)
        else:
            result = scratch.view(self._parts[0].size, self._parts[0].dtype)
            combine(self._parts, op, result, scale)
            split(result, targets)
        memory.post(self._number, PACKED, CONSUMED, READY, UNPACKED)


def are_large(nbytes: int, tensors: Sized) -> bool:
    """Whether tensors of `nbytes` together are better reduced one by one than as one."""
    return nbytes >= len(tensors) * _PIECE_BYTES
