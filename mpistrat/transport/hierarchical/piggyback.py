"""Small all-reduces between hosts, sent together with the votes, so that one network round trip serves both.

Used by the engine's thread.
"""

from collections.abc import Sequence

import numpy as np

from ...core.arithmetic import IDENTITY, Reduction, combine, pack, unpack
from ...core.interfaces import DataPlane, Prepared
from ...core.tuning import PIGGYBACK_CROSS_BYTES, PIGGYBACK_HOST_BYTES, PIGGYBACK_MOST_HOSTS


class PiggybackedReduce(Prepared):
    """An all-reduce that is sent together with the next vote.

    Attributes:
        part: This rank's elements.
        result: The elements of the result, in shared memory.
    """

    __slots__ = ("part", "result")

    def __init__(self, plane: DataPlane, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
                 reduction: Reduction, part: np.ndarray, result: np.ndarray):
        super().__init__(plane, sources, targets, reduction)
        self.part, self.result = part, result
        self.is_packed = True

    def finish(self, all_packed: bool) -> None:
        """See Prepared. After the outcome ALL_READY, only copy the result to the targets."""
        if all_packed:
            unpack(self.result, self.targets)
        else:
            super().finish(all_packed)


class Piggyback:
    """The data of one host for a vote.

    Each rank packs its part into its slot of shared memory (`pack`). The first rank of the host packs nothing if it has
    a single array, which it reads in place. When all ranks have voted and are ready, the first rank reduces the parts
    (`reduce_host`), sends the result with the host's vote, and reduces the results of all hosts into the result slot
    (`reduce_hosts`), before it posts the outcome. Then each rank copies the result (`PiggybackedReduce.finish`).

    No counters are needed. A rank reuses its slot only after the outcome, when its part has been read. The result is
    overwritten only after the next vote of every rank, when all ranks have copied the result.

    Elements are summed in the same order as by HierarchicalData, with the same result.

    Args:
        memory: `memory_bytes` of shared memory of the ranks of the host.
        index: This rank's position among the ranks of the host.
        count: The number of ranks of the host.
        slot_bytes: Bytes of the largest all-reduce, see `largest`.
    """

    def __init__(self, memory: memoryview, index: int, count: int, slot_bytes: int):
        self._bytes = np.frombuffer(memory[:self.memory_bytes(count, slot_bytes)], np.uint8).reshape(count + 1,
                                                                                                     slot_bytes)
        self._index, self.slot_bytes = index, slot_bytes
        self._views: dict[np.dtype, list[np.ndarray]] = {}
        self._latest: PiggybackedReduce | None = None  # on the first rank

    @staticmethod
    def largest(local_sizes: Sequence[int]) -> int:
        """Bytes of the largest all-reduce to send with a vote, for these numbers of ranks per host; 0: none."""
        hosts = len(local_sizes)
        if hosts > PIGGYBACK_MOST_HOSTS:
            return 0
        host_bytes = PIGGYBACK_HOST_BYTES // max(local_sizes)
        return (host_bytes if hosts == 2 else min(host_bytes, PIGGYBACK_CROSS_BYTES // hosts)) // 64 * 64

    @staticmethod
    def memory_bytes(count: int, slot_bytes: int) -> int:
        """Bytes of shared memory for `count` ranks."""
        return (count + 1) * slot_bytes

    def pack(self, plane: DataPlane, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray],
             reduction: Reduction, elements: int) -> PiggybackedReduce:
        """Pack this rank's part for the next vote: `elements` in all, at most `slot_bytes`. Local.

        `plane` reduces the part if the outcome of the vote is not ALL_READY.
        """
        views = self._views_of(sources[0].dtype)
        if self._index == 0 and len(sources) == 1 and reduction.prescale == 1.0:
            # Only this rank reads its part, so it needs no copy (1 MB, 2 hosts of 2 ranks: 6.3 ms instead of 6.8).
            part = sources[0].reshape(-1)
        else:
            part = views[self._index][:elements]
            pack(sources, part, reduction.prescale)
        prepared = PiggybackedReduce(plane, sources, targets, reduction, part, views[-1][:elements])
        if self._index == 0:
            self._latest = prepared
        return prepared

    def _views_of(self, dtype: np.dtype) -> list[np.ndarray]:
        """The slots of the ranks, then that of the result, as arrays of `dtype`."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = [part.view(dtype) for part in self._bytes]
        return views

    # -- on the first rank of a host, when all its ranks have packed and voted ----------------------------------------

    def reduce_host(self, target: np.ndarray) -> int:
        """Write the host's partial result to `target`, of `slot_bytes` bytes. Returns the bytes written."""
        prepared = self._latest
        assert prepared is not None
        size, dtype, nbytes = prepared.result.size, prepared.result.dtype, prepared.result.nbytes
        parts = [prepared.part, *[part[:size] for part in self._views_of(dtype)[1:-1]]]
        combine(parts, prepared.reduction.op, target[:nbytes].view(dtype), IDENTITY)
        return nbytes

    def reduce_hosts(self, rows: Sequence[np.ndarray]) -> None:
        """Reduce the partial results of all hosts, in their order. All ranks have agreed on the all-reduce."""
        prepared = self._latest
        assert prepared is not None
        parts = [row.view(prepared.result.dtype) for row in rows]
        combine(parts, prepared.reduction.op, prepared.result, prepared.reduction.scale)

    def forget(self) -> None:
        """Drop the references to the packed all-reduce, since the vote is over."""
        self._latest = None
