"""Executor: executes the operations that the ranks have agreed on, and completes their handles.

The controller calls it in the thread that drives the engine.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from ..core import annotations
from ..core.arithmetic import Reduction, pack, scaled_copy, unpack
from ..core.errors import EngineError, InvalidRequestError
from ..core.fusion import BucketPlans, FusionBucket, is_fused
from ..core.handle import Entry, Handle, complete_all
from ..core.interfaces import DataPlane, DeviceExecutor, Observer, Prepared
from ..core.memory import FusionBuffer, ResultPool
from ..core.request import DEVICE_GPU, CollectiveType, ReduceOp, Request, is_half
from ..core.rows import exchanged_elements, received_rows, row_size, rows_of_ranks
from ..core.topology import Topology
from .not_finite import FiniteWatch

# -- neutral tensors ---------------------------------------------------------------------------------------------------
# A rank in join() takes part in the collectives of the other ranks with neutral tensors, which do not change the
# result. negotiation/subtree.py describes join(). Pure.


def neutral_arrays(request: Request) -> list[np.ndarray]:
    """Return new neutral arrays with the sizes and dtypes of the arrays that other ranks submit with `request`.

    They have zeros for a sum and for Adasum, the largest value for Min, the smallest for Max, ones for a product, no
    rows for an allgather, and any values for a broadcast. Raises EngineError: numpy does not know a dtype.
    """
    dtypes = []
    for tensor in request.tensors:
        try:
            dtypes.append(np.dtype(tensor.dtype))
        except TypeError:
            raise EngineError(f"{request.name}: this rank waits in join(), and numpy on this rank does not know the "
                              "dtype of the other ranks' tensors. Import ml_dtypes on all ranks. Received: "
                              f"{tensor.dtype}") from None
    if request.kind is CollectiveType.ALLGATHER:
        return [np.empty((0, *tensor.shape[1:]), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    sizes = [(math.prod(tensor.shape), dtype) for tensor, dtype in zip(request.tensors, dtypes, strict=True)]
    if request.layout:
        # `request.tensors` has the tensors of the first array, then of the next. Tensors of an array have one dtype.
        remaining = iter(sizes)
        arrays = [list(islice(remaining, len(indices))) for indices in request.layout]
        sizes = [(sum(size for size, _ in parts), parts[0][1]) for parts in arrays]
    return [np.full(size, _neutral_value(request, dtype), dtype) for size, dtype in sizes]


def _neutral_value(request: Request, dtype: np.dtype) -> object:
    op = request.scaled.op if request.kind is CollectiveType.ALLREDUCE else ReduceOp.SUM
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 1 if op is ReduceOp.PRODUCT else 0
    if dtype.kind == "b":
        return op is ReduceOp.MIN
    if dtype.kind in "iu":
        return np.iinfo(dtype).max if op is ReduceOp.MIN else np.iinfo(dtype).min
    return math.inf if op is ReduceOp.MIN else -math.inf


# -- Adasum ------------------------------------------------------------------------------------------------------------
# Adasum combines gradients so that their common parts count only once (Maleki et al., MLSys 2021).
#
# Two gradients a and b become `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b`: their mean if they are equal, their sum if
# they are orthogonal. More ranks are combined in pairs, and the results in pairs again; a rank without a partner waits
# for the next level. Neighbours come first, so the ranks of a host are combined with each other before other hosts.
#
# Each rank works on one slice of each tensor, as in an all-reduce: it receives the slices of all ranks, and the ranks
# sum the dot products of their slices at each level. So any number of ranks is possible, and each byte is sent as often
# as in an all-reduce. Dot products are in float64. All ranks get the same bits, because each slice has one owner.


def _combined_pairs(data: DataPlane, slices: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    """Return the results of one level of Adasum: for each tensor, combine the ranks' slices in pairs. Collective."""
    pairs = [list(zip(parts[::2], parts[1::2])) for parts in slices]
    dots = np.array([[_dots(a, b) for a, b in pairs_of_tensor] for pairs_of_tensor in pairs])
    flat = dots.reshape(-1)
    data.allreduce([flat], [flat], Reduction(ReduceOp.SUM))
    results = []
    for parts, pairs_of_tensor, dots_of_tensor in zip(slices, pairs, dots, strict=True):
        combined = [_pair(a, b, *products) for (a, b), products in zip(pairs_of_tensor, dots_of_tensor, strict=True)]
        results.append(combined + parts[2 * len(combined):])
    return results


def _dots(a: np.ndarray, b: np.ndarray) -> tuple[float, float, float]:
    """Return a.b, |a|^2 and |b|^2 in float64."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(a @ b), float(a @ a), float(b @ b)


def _pair(a: np.ndarray, b: np.ndarray, dot: float, norm_a: float, norm_b: float) -> np.ndarray:
    """Return the Adasum of two tensors, from their dot products. If one tensor is zero, return the other tensor."""
    of_a = 1.0 - dot / (2 * norm_a) if norm_a else 1.0
    of_b = 1.0 - dot / (2 * norm_b) if norm_b else 1.0
    return a * a.dtype.type(of_a) + b * b.dtype.type(of_b)


# -- the executor ------------------------------------------------------------------------------------------------------

_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(slots=True)
class _Partial:
    """The results so far of an entry that shares a bucket, or has several buckets."""

    results: list[Any]
    missing: int
    first: "_Job"  # Of the first bucket.


@dataclass(slots=True)
class _Job:
    """A bucket in execution, with Entry.number of its first entry, and when its reduction began and ended."""

    bucket: FusionBucket
    sources: Sequence[np.ndarray]
    targets: list[np.ndarray]
    number: int
    began: int = 0
    ended: int = 0


class Executor:
    """Executes entries that are the same on all ranks: CPU arrays with `data`, GPU tensors with `device`.

    Args:
        fusion_bytes: The size limit of a fusion buffer; 0: tensors are not fused.
        observer: Gets the complete entries of CPU tensors.
        finite: Checks gradients for Inf and NaN; None: they are not checked.
    """

    def __init__(self, data: DataPlane, topology: Topology, fusion_bytes: int, device: DeviceExecutor,
                 observer: Observer, finite: FiniteWatch | None = None):
        self.observer, self._finite, self._executed = observer, finite, 0
        self.data, self._topology, self._fusion_bytes, self.device = data, topology, fusion_bytes, device
        self._rank, self._size = topology.rank, topology.size
        self._pool = ResultPool()
        self._buffer = FusionBuffer()
        self._plans = BucketPlans(topology.size)
        self._prepared: tuple[Entry, Prepared] | None = None
        # Called once, before the next entries are executed, in the thread that drives. It must not block.
        self.before_next: Callable[[], None] | None = None

    def execute(self, entries: Sequence[Entry], all_ready: bool = False, divisor: int | None = None) -> None:
        """Run the collectives of entries that are the same on all ranks, and complete the handles. Collective.

        The handles of GPU tensors may be completed later, by `device`.

        `all_ready`: There is one entry, for which all ranks have voted, and `prepare` has returned True on all ranks.
        `divisor`: The divisor of averages; None: the number of ranks.

        Raises EngineError: `all_ready` is true, but this rank no longer has the result of `prepare`.
        """
        if not entries:
            return
        if self.before_next is not None:
            call, self.before_next = self.before_next, None
            call()
        prepared, self._prepared = self._prepared, None
        now = monotonic_ns()
        for number, entry in enumerate(entries, self._executed):
            entry.agreed, entry.number = now, number
        self._executed += len(entries)
        # `prepare` assumed an average over all ranks, so its result cannot be used with a divisor.
        if prepared is not None and len(entries) == 1 and prepared[0] is entries[0] and divisor is None:
            if annotations.is_on():
                with annotations.marked(entries[0].request):
                    prepared[1].finish(all_ready)
            else:
                prepared[1].finish(all_ready)
            ended = monotonic_ns()
            if entries[0].request.labels:
                self._look(entries[0], prepared[1].targets)
            entries[0].handle.complete(list(prepared[1].targets))
            self.observer.add(entries[0], entries[0].number, now, ended)
            self._pool.end_round()
            return
        if all_ready:
            raise EngineError(f"{entries[0].request.name}: all ranks have voted that they are ready, but this rank is "
                              "not ready any more. This is an error of mpistrat. Please report it.")
        on_gpu = [entry for entry in entries if entry.request.device == DEVICE_GPU]
        if on_gpu:
            # GPU entries first, so that the GPU works while this thread reduces the other entries.
            with annotations.marked(on_gpu[0].request):
                self.device.execute(on_gpu, divisor)
            entries = [entry for entry in entries if entry.request.device != DEVICE_GPU]
            if not entries:
                self._pool.end_round()
                return
        partials: dict[int, _Partial] = {}
        jobs = []  # All memory is taken first, so that a rank without memory fails before other ranks wait for it.
        for bucket in self._plans.plan(entries, self._fusion_bytes, divisor):
            sources = cast("Sequence[np.ndarray]", entries[bucket.whole].arrays if bucket.whole is not None else
                           [entries[index].arrays[i] for index, i in bucket.members])
            targets = list(map(self._pool.take, map(_SHAPE, sources), map(_DTYPE, sources)))
            jobs.append(_Job(bucket, sources, targets, entries[bucket.members[0][0]].number))
        for job in jobs:
            self._run(job)
            self._deliver(job, entries, partials)
        for entry in entries:
            if not entry.arrays:  # A barrier or an empty group: complete once the ranks have agreed on it.
                entry.handle.complete([])
                self.observer.add(entry, entry.number, entry.agreed, entry.agreed)
            elif not is_fused(entry.request):
                self._run_single(entry)
        self._pool.end_round()

    def absent_entry(self, request: Request) -> Entry:
        """Return an entry with neutral tensors, with which this rank takes part in `request` while it is in join()."""
        arrays = neutral_arrays(request)
        return Entry(request, arrays if request.device != DEVICE_GPU else self.device.uploaded(arrays),
                     Handle(request.name))

    def prepare(self, entry: Entry) -> bool:
        """Begin to execute `entry` before the ranks agree on it: pack its data, if that saves time. Local.

        Returns whether the other ranks can complete it without further data of this rank; see `all_ready` of `execute`.
        """
        request = entry.request
        self._prepared = None
        if request.kind is not CollectiveType.ALLREDUCE or request.device == DEVICE_GPU:
            return False
        buckets = self._plans.plan([entry], self._fusion_bytes)
        if not buckets or buckets[0].whole is None:
            return False
        sources = cast("Sequence[np.ndarray]", entry.arrays)
        targets = list(map(self._pool.take, map(_SHAPE, sources), map(_DTYPE, sources)))
        self._prepared = entry, self.data.prepare(sources, targets, buckets[0].reduction)
        return self._prepared[1].is_packed

    def prepare_more(self) -> None:
        """Continue to pack the data of the entry of `prepare`. Local."""
        if self._prepared is not None:
            self._prepared[1].pack_ahead()

    def _run(self, job: _Job) -> None:
        request, sources, targets = job.bucket.request, job.sources, job.targets
        job.began = monotonic_ns()
        with annotations.marked(request):
            if request.kind is CollectiveType.ALLREDUCE:
                self.data.allreduce(sources, targets, job.bucket.reduction)
            elif len(sources) == 1:
                np.copyto(targets[0], sources[0])
                self.data.broadcast(targets[0].reshape(-1), request.root_rank)
            else:
                packed = self._buffer.view(sum(source.size for source in sources), sources[0].dtype)
                pack(sources, packed)
                self.data.broadcast(packed, request.root_rank)
                unpack(packed, targets)
        job.ended = monotonic_ns()

    def _deliver(self, job: _Job, entries: Sequence[Entry], partials: dict[int, _Partial]) -> None:
        """Store the job's results in their entries, and complete the entries that have all results."""
        bucket = job.bucket
        if bucket.whole is not None:
            if entries[bucket.whole].request.labels:
                self._look(entries[bucket.whole], job.targets)
            entries[bucket.whole].handle.complete(job.targets)
            self.observer.add(entries[bucket.whole], job.number, job.began, job.ended)
            return
        done: list[tuple[Entry, _Partial]] = []
        for (index, i), result in zip(bucket.members, job.targets, strict=True):
            partial = partials.get(index)
            if partial is None:
                count = len(entries[index].arrays)
                partial = partials[index] = _Partial([None] * count, count, job)
            partial.results[i] = result
            partial.missing -= 1
            if partial.missing == 0:
                if entries[index].request.labels:
                    self._look(entries[index], partial.results)
                done.append((entries[index], partial))
        complete_all((entry.handle, partial.results) for entry, partial in done)
        for entry, partial in done:
            self.observer.add(entry, partial.first.number, partial.first.began, job.ended)

    def _look(self, entry: Entry, results: Sequence[np.ndarray]) -> None:
        """Check results for Inf and NaN, if they are gradients. Only reduced entries with labels are gradients."""
        if self._finite is not None and entry.request.kind is CollectiveType.ALLREDUCE:
            self._finite.look(entry, results)

    def _run_single(self, entry: Entry) -> None:
        began = monotonic_ns()
        try:
            with annotations.marked(entry.request):
                results = _SINGLE[entry.request.kind](self, entry)
        except InvalidRequestError as error:  # The same on all ranks.
            entry.handle.fail(error)
        else:
            ended = monotonic_ns()
            entry.handle.complete(results)
            self.observer.add(entry, entry.number, began, ended)

    def _allgather(self, entry: Entry) -> list[np.ndarray]:
        arrays = _arrays(entry)
        # Row counts are gathered here, not negotiated, so that a step with other row counts has the same requests.
        own = np.array([array.shape[0] for array in arrays], np.int64)
        rows = np.empty((self._size, len(arrays)), np.int64)
        self.data.allgather(own, rows.reshape(-1), [len(arrays)] * self._size)
        results = []
        for array, counts in zip(arrays, rows.T, strict=True):
            elements = row_size(array.shape)
            result = self._pool.take((int(counts.sum()), *array.shape[1:]), array.dtype)
            self.data.allgather(array.reshape(-1), result.reshape(-1), [int(count) * elements for count in counts])
            results.append(result)
        return results

    def _alltoall(self, entry: Entry) -> list[np.ndarray]:
        array, splits = _arrays(entry)
        # As for an allgather, the numbers of rows are exchanged here.
        own = np.array([array.shape[0], *splits], np.int64)
        table = np.empty((self._size, own.size), np.int64)
        self.data.allgather(own, table.reshape(-1), [own.size] * self._size)
        received = received_rows(entry.request.name, table, self._topology)
        result = self._pool.take((int(received.sum()), *array.shape[1:]), array.dtype)
        self.data.alltoall(array.reshape(-1), result.reshape(-1),
                            *exchanged_elements(table, self._rank, row_size(array.shape)))
        return [result, received.astype(splits.dtype)]

    def _reducescatter(self, entry: Entry) -> list[np.ndarray]:
        results = []
        for array in _arrays(entry):
            rows = rows_of_ranks(array.shape[0], self._size)
            elements = row_size(array.shape)
            result = self._pool.take((rows[self._rank], *array.shape[1:]), array.dtype)
            self.data.reducescatter(array.reshape(-1), result.reshape(-1), [count * elements for count in rows],
                                     self._plans.reduction(entry.request))
            results.append(result)
        return results

    def _adasum(self, entry: Entry) -> list[np.ndarray]:
        """Return the Adasum of each tensor. The arrays have the same shapes and floating-point dtypes on all ranks."""
        arrays, rank, size, scaled = _arrays(entry), self._rank, self._size, entry.request.scaled
        results = [self._pool.take(array.shape, array.dtype) for array in arrays]
        # The number of elements of each tensor that each rank owns.
        owned = [[array.size * (r + 1) // size - array.size * r // size for r in range(size)] for array in arrays]
        # For each tensor, this rank's slice of the tensor of each rank, in rank order.
        slices: list[list[np.ndarray]] = []
        for array, counts in zip(arrays, owned, strict=True):
            parts = np.empty((size, counts[rank]), array.dtype)
            self.data.alltoall(array.reshape(-1), parts.reshape(-1), counts, [counts[rank]] * size, max(counts))
            wide = parts.astype(np.float32) if is_half(parts.dtype) else parts
            scaled_copy(wide, scaled.prescale, wide)
            slices.append(list(wide))
        while len(slices[0]) > 1:
            slices = _combined_pairs(self.data, slices)
        for result, counts, (own,) in zip(results, owned, slices, strict=True):
            scaled_copy(own, scaled.postscale, own)
            self.data.allgather(own.astype(result.dtype, copy=False), result.reshape(-1), counts)
        return results


# The methods for entries that are executed one by one. An all-reduce that is not fused (fusion.is_fused) is Adasum.
_SINGLE: dict[CollectiveType, Callable[[Executor, Entry], list[np.ndarray]]] = {
    CollectiveType.ALLGATHER: Executor._allgather, CollectiveType.ALLTOALL: Executor._alltoall,
    CollectiveType.REDUCESCATTER: Executor._reducescatter, CollectiveType.ALLREDUCE: Executor._adasum}


def _arrays(entry: Entry) -> Sequence[np.ndarray]:
    return cast("Sequence[np.ndarray]", entry.arrays)
