"""One-shot all-reduce for small messages in shared memory: every rank reads all parts, and reduces all elements.

Small messages are dominated by Python call overhead (about 0.8 us per call with cold caches), so this takes as few
calls as possible. If all ranks have packed before they agree on the all-reduce, no rank waits for another afterwards.
Used by the engine's thread.
"""

from collections.abc import Sized
from typing import Any

import numpy as np

from ...core.arithmetic import combine, pack, segments, unpack
from ...core.interfaces import Prepared
from ...core.tuning import SHM_LARGE_TENSOR_BYTES
from .segment import CONSUMED, PACKED, READY, UNPACKED


class OneShot(Prepared):
    """A one-shot all-reduce. It counts as one chunk of TwoShotData.

    `parts`: The memory into which the ranks of the host pack. Each rank has a row, with all elements of the sources.
    """

    __slots__ = ("parts",)

    plane: Any  # TwoShotData, which imports this module
    parts: np.ndarray

    def pack_ahead(self) -> None:
        """Pack, if the memory is free. Local, never waits."""
        memory = self.plane.memory
        if not self.is_packed and memory.have_all(max(self.plane.free_at), CONSUMED):
            pack(self.sources, self.parts[memory.index], self.reduction.prescale)
            self.is_packed = True

    def finish(self, all_packed: bool) -> None:
        """See Prepared."""
        plane, parts, targets, op, scale = self.plane, self.parts, self.targets, self.reduction.op, self.reduction.scale
        memory, number = plane.memory, plane.last_chunk + 1
        if not all_packed:
            if not self.is_packed:
                memory.await_all(max(plane.free_at), CONSUMED)
                pack(self.sources, parts[memory.index], self.reduction.prescale)
            memory.post(number, PACKED)
            memory.await_all(number, PACKED)
        if len(targets) == 1:
            combine(parts, op, targets[0].reshape(-1), scale)
        elif are_large(parts[0].nbytes, targets):
            for elements, target in segments(targets):
                combine(parts[:, elements], op, target, scale)
        else:
            result = plane.scratch.view(parts[0].size, parts.dtype)
            combine(parts, op, result, scale)
            unpack(result, targets)
        memory.post(number, PACKED, CONSUMED, READY, UNPACKED)
        # It has used the memory of all slots.
        plane.last_chunk, plane.free_at = number, [number] * plane.slots


def are_large(nbytes: int, tensors: Sized) -> bool:
    """Whether to reduce tensors of `nbytes` together one by one, and not as one packed array."""
    return nbytes >= len(tensors) * SHM_LARGE_TENSOR_BYTES
