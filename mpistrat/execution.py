"""Execution of what the ranks have agreed on: fuse, reduce, unpack, complete. Called by the engine's thread only."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from .collectives.base import DataPlane
from .fusion import FusionBuffer, plan_buckets
from .memory import ResultPool
from .messages import Kind, ReduceOp
from .scale import Scale
from .stream import Stream
from .tensor_queue import Entry


@dataclass
class _Work:
    """An entry in execution: its result arrays, and how many of them are still to come."""

    entry: Entry
    results: list[np.ndarray]
    missing: int

    def arrived(self) -> None:
        """One more of the results is there; completes the handle with the last one."""
        self.missing -= 1
        if self.missing == 0:
            self.entry.handle.complete(self.results)


class Executor:
    """Executes lists of entries that are the same on all ranks.

    Args:
        data: The collectives.
        size: How many ranks there are.
        fusion_bytes: Size limit of a fusion buffer; 0: nothing is fused.
    """

    def __init__(self, data: DataPlane, size: int, fusion_bytes: int):
        self._data, self._size, self._fusion_bytes = data, size, fusion_bytes
        self._pool = ResultPool()
        self._buffer = FusionBuffer()

    def execute(self, entries: Sequence[Entry]) -> None:
        """Run the entries' collectives and complete their handles."""
        fused: list[tuple[_Work, int]] = []
        members: list[tuple[Hashable, int]] = []
        for entry in entries:
            request = entry.request
            if request.kind is Kind.ALLREDUCE or request.kind is Kind.BROADCAST:
                # All memory is taken before the first collective, so that a rank short of it fails before the others
                # wait for it there.
                results = [self._pool.take(array.shape, array.dtype) for array in entry.arrays]
                work = _Work(entry, results, len(results))
                alike = (request.kind, request.reduce_op, request.root_rank, request.prescale, request.postscale,
                         request.device)
                for i, array in enumerate(entry.arrays):
                    fused.append((work, i))
                    members.append(((alike, array.dtype), array.nbytes))
        for bucket in plan_buckets(members, self._fusion_bytes):
            self._run_bucket([fused[i] for i in bucket])
        for entry in entries:
            if entry.request.kind is Kind.ALLGATHER:
                entry.handle.complete(self._allgather(entry.arrays))
            elif not entry.arrays:  # A barrier, or an empty group: that all ranks agreed is all there is to it.
                entry.handle.complete([])
        self._pool.next_turn()

    def _run_bucket(self, bucket: list[tuple[_Work, int]]) -> None:
        request = bucket[0][0].entry.request
        sources = [work.entry.arrays[i] for work, i in bucket]
        targets = [work.results[i] for work, i in bucket]
        if request.kind is Kind.ALLREDUCE:
            average = request.reduce_op is ReduceOp.AVERAGE
            self._data.allreduce(sources, targets, ReduceOp.SUM if average else request.reduce_op, request.prescale,
                                 Scale(request.postscale, self._size if average else 1))
        else:
            self._broadcast(sources, targets, request.root_rank)
        for work, _ in bucket:
            work.arrived()

    def _broadcast(self, sources: list[np.ndarray], targets: list[np.ndarray], root_rank: int) -> None:
        if len(sources) == 1:
            np.copyto(targets[0], sources[0])
            self._data.broadcast(targets[0].reshape(-1), root_rank)
            return
        packed = self._buffer.view(sum(source.size for source in sources), sources[0].dtype)
        Stream(sources).copy_to(packed)
        self._data.broadcast(packed, root_rank)
        Stream(targets).copy_from(packed)

    def _allgather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        # How many rows each rank brings is not negotiated but gathered here, so that a step with other row counts is
        # still a step seen before.
        own = np.array([array.shape[0] for array in arrays], np.int64)
        rows = np.empty((self._size, len(arrays)), np.int64)
        self._data.allgather(own, rows.reshape(-1), [len(arrays)] * self._size)
        results = []
        for array, counts in zip(arrays, rows.T, strict=True):
            row_size = int(np.prod(array.shape[1:], dtype=np.int64))
            result = self._pool.take((int(counts.sum()), *array.shape[1:]), array.dtype)
            self._data.allgather(array.reshape(-1), result.reshape(-1), [int(count) * row_size for count in counts])
            results.append(result)
        return results
