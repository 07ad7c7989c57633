"""An all-reduce that is small enough for one chunk of shared memory, all of which every rank reduces.

It does what SharedMemoryData does with many chunks, in as few steps as it takes: the time of a small all-reduce is that
of Python's calls, about 0.8 us each when the processor has last run something else.
"""

from collections.abc import Sequence

import numpy as np

from ..fusion import FusionBuffer
from ..messages import ReduceOp
from ..scale import Scale, scaled_copy
from .host_memory import CONSUMED, PACKED, READY, UNPACKED, HostMemory
from .reduction import combine

# Tensors of this size on average are reduced one by one to where the result goes; smaller ones as one, and then copied.
PIECE_BYTES = 32 * 1024


class OneChunk:
    """One such all-reduce.

    Args:
        memory: Has the counters.
        slot: Where the chunk is: an array for each rank of the host, and one that is not used here.
        number: The chunk's, counted over all all-reduces.
        slots: How many chunks may be under way.
        sources, targets, op, prescale, scale: As in DataPlane.allreduce.
        elements: Of all sources.
    """

    __slots__ = ("_elements", "_is_packed", "_memory", "_number", "_op", "_prescale", "_scale", "_slot", "_slots",
                 "_sources", "_targets")

    def __init__(self, memory: HostMemory, slot: list[np.ndarray], number: int, slots: int,
                 sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], elements: int, op: ReduceOp,
                 prescale: float, scale: Scale):
        self._memory, self._slot, self._number, self._slots = memory, slot, number, slots
        self._sources, self._targets, self._elements = sources, targets, elements
        self._op, self._prescale, self._scale = op, prescale, scale
        self._is_packed = False

    def pack_ahead(self) -> None:
        """Pack, if the chunk's place is free."""
        if self._memory.have_all(CONSUMED, self._number - self._slots + 1):
            self._pack()

    def _pack(self) -> None:
        mine, start = self._slot[self._memory.index], 0
        for source in self._sources:
            stop = start + source.size
            scaled_copy(source.reshape(-1), self._prescale, mine[start:stop])
            start = stop
        self._is_packed = True

    def finish(self, scratch: FusionBuffer) -> None:
        """Do the rest. Collective."""
        memory, number = self._memory, self._number
        if not self._is_packed:
            memory.await_all(CONSUMED, number - self._slots + 1)
            self._pack()
        memory.post(number + 1, PACKED)
        memory.await_all(PACKED, number + 1)
        self._reduce(scratch)
        memory.post(number + 1, CONSUMED, READY, UNPACKED)

    def _reduce(self, scratch: FusionBuffer) -> None:
        parts, targets = [part[:self._elements] for part in self._slot[:-1]], self._targets
        if len(targets) == 1:
            combine(parts, self._op, targets[0].reshape(-1), self._scale)
            return
        are_large = parts[0].nbytes >= len(targets) * PIECE_BYTES
        if not are_large:
            result, start = scratch.view(self._elements, parts[0].dtype), 0
            combine(parts, self._op, result, self._scale)
        start = 0
        for target in targets:
            flat, stop = target.reshape(-1), start + target.size
            if are_large:
                combine([part[start:stop] for part in parts], self._op, flat, self._scale)
            else:
                flat[...] = result[start:stop]
            start = stop
