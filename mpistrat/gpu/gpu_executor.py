"""Executes the collectives on GPU tensors that the ranks have agreed on: enqueues the work, and completes the handles.

The ranks choose the backend together before their first collective on GPU tensors. All-gathers, reduce-scatters and
all-to-alls are not fused. Before an all-gather or an all-to-all the ranks exchange their numbers of rows over the data
plane for CPU tensors, because the size of the result depends on these numbers.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import numpy as np

from ..core.errors import EngineError, InvalidRequestError
from ..core.fusion import BucketPlans, FusionBucket, is_fused
from ..core.handle import Entry, Handle, complete_all
from ..core.interfaces import DataPlane, DeviceExecutor, Observer
from ..core.quantised import INT8
from ..core.request import Array, CollectiveType, ReduceOp
from ..core.rows import exchanged_elements, received_rows, row_size, rows_of_ranks
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import ENGINE_IDLE_POLL_S, GPU_LOOK_S, KEPT_FUSION_PLANS, WATCHDOG_REVOKE_S
from .arrays import Allocated, BucketList, GpuArray, GpuDevice, GpuEvent, GpuTensors, RecordedStream
from .assignment import release
from .backend import GpuBackend, Reducer, StagedData, Watchdog, await_on_host, last_of_streams, within
from .connect import connect, exchange_over
from .nccl_data import NcclData
from .proof import Kind, Proof, check_waiting, one_line

logger = logging.getLogger(__name__)

_COMPLETE = Handle("complete")  # Without results.
_COMPLETE.complete([])
_NOTHING = Allocated((), [], None)

Shape = tuple[int, ...]
Run = Callable[["Work"], None]  # Enqueues the work of an entry.


@dataclass(slots=True)
class Work:
    """A submitted request (entry), its tensors, its results' memory, and `run` to enqueue it (None: it is fused)."""

    entry: Entry
    tensors: GpuTensors
    made: Allocated
    run: Run | None

    def targets(self, shapes: Sequence[tuple[int, ...]]) -> list[GpuArray]:
        """Return the memory for the results as arrays with these shapes."""
        return list(map(GpuArray, self.made.addresses, shapes, self.tensors.dtypes, self.made.results))


@dataclass(slots=True, eq=False)
class Batch:
    """Entries that were enqueued together at the time `since`. They are complete after the events `ends`."""

    works: list[Work]
    ends: list[GpuEvent]
    since: float
    began: int  # As `since`, as time.monotonic_ns().
    is_complete: bool = False  # Whether the handles are complete.

    def complete(self) -> None:
        """Complete the handles of the entries. May be called twice."""
        if not self.is_complete:
            self.is_complete = True
            complete_all([(work.entry.handle, work.made.results) for work in self.works])

    def release(self) -> None:
        """Drop the tensors and results whose memory is only reused by work that waits for `ends`. Keep all others."""
        for work in self.works:
            tensors = work.tensors
            if tensors.streams and tensors.streams == tensors.readers:
                work.made, work.entry.handle = _NOTHING, _COMPLETE
                tensors.owner = tensors.made = tensors.allocate = None  # type: ignore[assignment]


def tensors_in(entry: Entry) -> GpuTensors:
    """Return the GPU tensors of an entry. An all-to-all also has splits, which are on the host."""
    arrays: Any = entry.arrays
    tensors: GpuTensors = arrays if type(arrays) is GpuTensors else arrays[0]
    return tensors


def over(batches: deque[Batch], but: int = 0) -> Iterator[Batch]:
    """Remove and yield the batches before the first that the GPU has not finished. Keeps the last `but` batches."""
    while len(batches) > but and False not in [end.done for end in batches[0].ends]:
        yield batches.popleft()


class GpuExecutor(DeviceExecutor):
    """Executes collectives on GPU tensors, see interfaces.DeviceExecutor. For one thread at a time.

    Args:
        host: The data plane for CPU tensors of these ranks.
        settings: The same on all ranks.
        observer: Its `add` is called for each complete entry.
        clock: Returns the time in seconds, from any origin.
    """

    def __init__(self, topology: Topology, host: DataPlane, settings: Settings, observer: Observer,
                 clock: Callable[[], float] = time.monotonic):
        self._observer = observer
        self._topology, self._host, self._settings, self._clock = topology, host, settings, clock
        self._device: GpuDevice | None = None
        # NCCL if it can be used, then staging, which can do everything. Empty before the first tensor.
        self._backends: Sequence[GpuBackend] = ()
        self._plans = BucketPlans(topology.size)
        self._fusion_bytes = 0
        self.batches: deque[Batch] = deque()
        # The batches that streams wait for. Their memory is kept while the GPU uses it.
        self.kept: deque[Batch] = deque()
        # The batches of lists with buckets that are not enqueued yet, by the index in the list.
        self._lists: dict[BucketList, dict[int, Batch]] = {}
        self._looked = -math.inf
        self._underway: list[Work] = []
        # A reducer of NCCL has a kind as long as that kind is not trusted.
        self._reducers: dict[FusionBucket, tuple[Reducer, Kind | None]] = {}
        self._proof: Proof | None = None
        self._completes_by_streams = False
        self._logged: set[str] = set()
        self.findings: list[str] = []
        self._exchange = exchange_over(host, topology.size)
        self._watchdog: Watchdog | None = None

    def execute(self, entries: Sequence[Entry], divisor: int | None = None) -> None:
        device = tensors_in(entries[0]).device
        with device.current():
            if not self._backends:
                self._connect(device)
            with self._watchdog or nullcontext():
                self._enqueue(device, entries, divisor)

    def uploaded(self, arrays: Sequence[np.ndarray]) -> Sequence[Array]:
        if self._device is None:
            return super().uploaded(arrays)
        with self._device.current():
            return self._staged.uploaded(arrays)

    def _enqueue(self, device: GpuDevice, entries: Sequence[Entry], divisor: int | None) -> None:
        # Kept in case of an exception, since the GPU may already use the memory.
        works = self._underway = []
        began = time.monotonic_ns()
        events: list[GpuEvent] = []
        late: dict[int, RecordedStream] = {}  # results were allocated in their order after the events
        for entry in entries:
            # All results are allocated before the first collective. A rank that is short of memory then fails before
            # the others wait for it in a collective.
            tensors = tensors_in(entry)
            made, run = tensors.made, None
            if made is None or not is_fused(entry.request):
                try:
                    shapes, run = self._planned(entry, tensors)
                except InvalidRequestError as error:  # The same on all ranks.
                    entry.handle.fail(error)
                    continue
                made = made or tensors.allocate(shapes)
                if made.stream is not None:
                    late[made.stream.ptr] = made.stream
            events += tensors.ready
            works.append(Work(entry, tensors, made, run))
        events = last_of_streams([*events, *map(device.record, late.values())] if late else events)
        for backend in self._backends:
            backend.wait_for(events)
        for bucket in self._plans.plan([work.entry for work in works], self._fusion_bytes, divisor):
            self._run_bucket(bucket, works)
        for work in works:
            if work.run is not None:
                work.run(work)
        ends = [event for backend in self._backends for event in backend.finish()]
        if self._proof is not None:
            self._proof.compare(ends)
        self._underway, now = [], self._clock()
        of_lists: dict[BucketList | None, list[Work]] = {}  # the entries of each list; None: without a list
        for work in works:
            of_lists.setdefault(work.tensors.bucket and work.tensors.bucket[0], []).append(work)
        for list_, its_works in of_lists.items():
            batch = Batch(its_works, ends, now, began)
            if not self._completes_by_streams or None in [work.tensors.readers for work in its_works]:
                self.batches.append(batch)
                continue
            self.kept.append(batch)
            for together in [[batch]] if list_ is None else self._due(list_, batch):
                self._await_in_streams(device, together)
        self._release(but=1)

    def _due(self, list_: BucketList, batch: Batch) -> Iterator[list[Batch]]:
        """Add the enqueued `batch` to its list. Yield the list's batches when all buckets of the list are enqueued."""
        enqueued = self._lists.setdefault(list_, {})
        for work in batch.works:
            assert work.tensors.bucket is not None, "it is in a list"
            if work.tensors.bucket[1] in enqueued:  # The execution of the graph before this one has ended in an error.
                yield list(dict.fromkeys(enqueued.values()))
                enqueued.clear()
            enqueued[work.tensors.bucket[1]] = batch
        if len(enqueued) == list_.count:
            yield list(dict.fromkeys(self._lists.pop(list_).values()))

    def _await_in_streams(self, device: GpuDevice, batches: Sequence[Batch]) -> None:
        """Make the streams that read the results wait for these batches, and complete the handles."""
        left = [batch for batch in batches if not batch.is_complete]
        ends = last_of_streams([end for batch in left for end in batch.ends])
        works = [work for batch in left for work in batch.works]
        self._make_wait(device, works, ends)
        for work in works:
            work.tensors.ends = ends
        for batch in left:
            batch.complete()
            batch.release()

    def _make_wait(self, device: GpuDevice, works: Sequence[Work], ends: Sequence[GpuEvent]) -> None:
        readers = works[0].tensors.readers or () if len(works) == 1 else \
            {reader.ptr: reader for work in works for reader in work.tensors.readers or ()}.values()
        for reader in readers:
            for end in ends:
                device.wait(reader, end)

    def poll(self) -> bool:
        looks_at_kept = bool(self.kept) and self._clock() - self._looked >= ENGINE_IDLE_POLL_S
        if not (self.batches or looks_at_kept):
            return False
        assert self._device is not None, "execute sets it"
        with self._device.current():
            finished = False
            for batch in over(self.batches):
                self._end(batch)
                finished = True
            if looks_at_kept:
                self._release()
            if not finished:
                self._check()
        return finished

    def _release(self, but: int = 0) -> None:
        """Remove the batches in `kept` before the first that the GPU has not finished. Leaves the last `but`."""
        self._looked = self._clock()
        for batch in over(self.kept, but):
            self._end(batch)

    def _end(self, batch: Batch) -> None:
        """Complete a batch that the GPU has finished. Report its entries to the observer, with this moment as end."""
        batch.complete()
        ended = time.monotonic_ns()
        for work in batch.works:
            self._observer.add(work.entry, batch.works[0].entry.number, batch.began, ended)

    def await_kept(self) -> None:
        ends = [end for batch in self.kept.copy() for end in batch.ends]
        if ends:
            assert self._device is not None, "execute sets it"
            with self._device.current():
                for end in ends:
                    await_on_host(end, self._settings.limit_s)

    def drain(self) -> None:
        while self.batches or self.kept:
            self._looked = -math.inf
            if not self.poll():
                time.sleep(GPU_LOOK_S)

    def unfinished(self) -> list[Entry]:
        return [work.entry for batch in (*self.batches, *self.kept) for work in batch.works]

    def halt(self) -> None:
        enqueued = [work for batch in (*self.batches, *self.kept) for work in batch.works
                    if not batch.is_complete or work.tensors.readers == []]
        works, device = [*self._underway, *enqueued], self._device
        if device is None or not works:
            return
        try:
            with device.current():
                ends = [event for backend in self._backends for event in backend.last_events()]
                self._make_wait(device, works, ends)
                for work in works:  # Those in whose streams the caller would have waited later.
                    if work.tensors.readers is not None and not work.tensors.readers:
                        for stream, end in product(work.tensors.streams, ends):
                            device.wait(stream, end)
                if all(work.tensors.readers is not None for work in works):
                    return
            within(WATCHDOG_REVOKE_S, self.abandon)
            with device.current():
                for end in ends:
                    await_on_host(end, WATCHDOG_REVOKE_S)
        except Exception:  # The first failure is reported. After it, every call to the GPU may fail.
            logger.debug("rank %d: the GPU may still write results", self._topology.job_rank, exc_info=True)

    def abandon(self) -> None:
        if self._device is None:
            return
        if self._watchdog is not None:
            self._watchdog.close()
        release(self._device, self)
        try:
            with self._device.current():
                for backend in self._backends:
                    backend.abandon()
        except Exception:  # The first failure is reported. After it, every call to the GPU may fail.
            logger.debug("rank %d: GPU collectives could not be aborted", self._topology.job_rank, exc_info=True)

    def close(self) -> None:
        if self._device is None or not self._backends:
            return
        if self._watchdog is not None:
            self._watchdog.close()
        with self._device.current():
            self._exchange(None)  # A barrier: no rank destroys its communicators while another one uses them.
            for backend in self._backends:
                backend.close()
            release(self._device, self)
            self._backends = ()

    # -- internals -----------------------------------------------------------------------------------------------------

    def _connect(self, device: GpuDevice) -> None:
        self._device = device
        nccl, self._fusion_bytes = connect(device, self._topology, self._exchange, self._host, self._settings, self)
        self._staged = StagedData(device, self._topology.rank, self._host, self._settings.limit_s)
        self._backends = (self._staged,) if nccl is None else (nccl, self._staged)
        self.findings = [f"GPU tensors are reduced by {self._host.name}, through host memory"
                         if nccl is None else "GPU tensors are reduced by NCCL"]
        if nccl is not None:
            self._watchdog = Watchdog(
                self._settings.limit_s, nccl.revoke, self.abandon, f"NCCL has kept rank {self._topology.job_rank} "
                f"waiting for {self._settings.limit_s:g} s; another rank may have died, or may not have called NCCL")
            if not self._settings.uses("shadow") or self._is_proved(device, nccl):
                self._completes_by_streams = self._streams_wait(device, nccl)
            logger.info("rank %d: GPU checks: %s", self._topology.job_rank, "; ".join(self.findings[1:] or ["none"]))

    def _is_proved(self, device: GpuDevice, nccl: NcclData) -> bool:
        """Reduce known numbers by NCCL. If a rank gets wrong results, all ranks stage. Return whether NCCL is used."""
        self._proof = Proof(device, self._staged, self._host, self._exchange, self._topology)
        with self._watchdog or nullcontext():
            wrong = self._proof.refusals(nccl)
        self.findings.append(f"check of NCCL with known numbers: {wrong or 'passed'}")
        if not wrong:
            return True
        if self._settings.gpu_operations == "nccl":
            raise EngineError(f"MPISTRAT_GPU_OPERATIONS=nccl: NCCL gives wrong numbers: {wrong}. Set "
                              "MPISTRAT_GPU_OPERATIONS=staged to reduce without NCCL.")
        if self._topology.rank == 0:
            logger.warning("rank 0: GPU tensors are staged through host memory and reduced by %s, since NCCL gives "
                           "wrong numbers: %s", self._host.name, wrong)
        self.abandon()
        self._backends, self._watchdog, self._fusion_bytes = (self._staged,), None, self._settings.fusion_bytes
        return False

    def _streams_wait(self, device: GpuDevice, nccl: NcclData) -> bool:
        """Return whether CUDA streams, not the host, should wait for results: only if a test of them passes. Local."""
        # Ranks in two process sets may enqueue the collectives of the two sets in different orders. If streams waited
        # for both, one set could wait for the other on one rank, and the other way round on another rank.
        if not self._settings.uses("stream_order") or not nccl.is_alone:
            return False
        try:
            check_waiting(device, nccl.buffer)
        except Exception as error:
            text = one_line(error)
            logger.warning("rank %d: the host waits for results of GPU collectives, because the check of CUDA streams "
                           "has not passed: %s", self._topology.job_rank, text)
            self.findings.append(f"check of CUDA streams not passed: {text}")
            return False
        self.findings.append("check of CUDA streams: passed")
        nccl.guard_results()
        return True

    def _run_bucket(self, bucket: FusionBucket, works: Sequence[Work]) -> None:
        if bucket.request.kind is CollectiveType.BROADCAST:
            arrays = [works[index].tensors[i] for index, i in bucket.members]
            self._backends[0].broadcast(arrays, [
                array._replace(address=works[index].made.addresses[i])
                for array, (index, i) in zip(arrays, bucket.members, strict=True)], bucket.request.root_rank)
            return
        if (known := self._reducers.get(bucket)) is None:
            if len(self._reducers) >= KEPT_FUSION_PLANS:
                self._reducers.clear()
            known = self._reducers[bucket] = self._reducer(bucket, works)
        reduce, kind = known
        if bucket.whole is not None:
            sources, targets = works[bucket.whole].tensors.addresses, works[bucket.whole].made.addresses
        else:
            sources = [works[index].tensors.addresses[i] for index, i in bucket.members]
            targets = [works[index].made.addresses[i] for index, i in bucket.members]
        if kind is not None and self._proof is not None and self._proof.trusts(
                kind, [(works[index].entry.request.name, works[index].tensors[i], target)
                       for (index, i), target in zip(bucket.members, targets, strict=True)], bucket.reduction):
            self._reducers[bucket] = reduce, None
        reduce(sources, targets)

    def _reducer(self, bucket: FusionBucket, works: Sequence[Work]) -> tuple[Reducer, Kind | None]:
        arrays = [works[index].tensors[i] for index, i in bucket.members]
        backend, reduction, wire_dtype = self._backends[0], bucket.reduction, bucket.request.wire_dtype
        wire_dtype = "" if wire_dtype == INT8 else wire_dtype
        if reduction.quantised is not None and len(self._topology.hosts) > 1:
            reason = "NCCL cannot sum the 8-bit integers of Compression.int8"
        else:
            reason = backend.why_not(arrays, reduction.op, wire_dtype)
        if reason:
            backend = self._backends[-1]
            if self._topology.rank == 0 and reason not in self._logged:
                self._logged.add(reason)
                logger.info("rank 0: some GPU tensors are staged through host memory: %s", reason)
        kind = None if backend is self._staged or reduction.op is ReduceOp.PRODUCT else (
            arrays[0].dtype.name, reduction.op, wire_dtype)
        return backend.reducer(arrays, reduction, wire_dtype), kind

    def _check(self) -> None:
        for backend in self._backends:
            backend.check()
        if not (self.batches or self.kept):
            return
        batch = min((batches[0] for batches in (self.batches, self.kept) if batches), key=lambda batch: batch.since)
        waited_s = self._clock() - batch.since
        if 0 < self._settings.limit_s < waited_s:
            names = ", ".join(work.entry.request.name for work in batch.works[:5])
            raise EngineError(f"the GPU of rank {self._topology.job_rank} has not finished {names} in {waited_s:.0f} "
                              "s; another rank may have died, or may not have begun these collectives")

    # -- entries that are executed one by one --------------------------------------------------------------------------

    def _planned(self, entry: Entry, tensors: GpuTensors) -> tuple[Sequence[Shape], Run | None]:
        """Return the shapes of the results, and a function that enqueues the entry; None if it is fused. Collective.

        Raises InvalidRequestError: The splits of an all-to-all do not match its rows. On all ranks.
        """
        kind = entry.request.kind
        if kind is CollectiveType.ALLGATHER:
            return self._allgather(tensors)
        if kind is CollectiveType.REDUCESCATTER:
            return self._reducescatter(entry, tensors)
        if kind is CollectiveType.ALLTOALL:
            return self._alltoall(entry, tensors)
        return tensors.shapes, None

    def _allgather(self, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        rows = list(zip(*self._exchange([shape[0] for shape in tensors.shapes]), strict=True))
        shapes = [(sum(counts), *shape[1:]) for shape, counts in zip(tensors.shapes, rows, strict=True)]

        def run(work: Work) -> None:
            for array, result, counts in zip(tensors, work.targets(shapes), rows, strict=True):
                elements = row_size(array.shape)
                self._backends[0].allgather(array, result, [count * elements for count in counts])

        return shapes, run

    def _reducescatter(self, entry: Entry, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        rows = [rows_of_ranks(shape[0], self._topology.size) for shape in tensors.shapes]
        shapes = [(counts[self._topology.rank], *shape[1:]) for shape, counts in zip(tensors.shapes, rows, strict=True)]

        def run(work: Work) -> None:
            reduction = self._plans.reduction(entry.request)
            for array, result, counts in zip(tensors, work.targets(shapes), rows, strict=True):
                elements = row_size(array.shape)
                backend = self._backends[-1 if self._backends[0].why_not_scatter(array, reduction) else 0]
                backend.reducescatter(array, result, [count * elements for count in counts], reduction)

        return shapes, run

    def _alltoall(self, entry: Entry, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        splits, array = cast("np.ndarray", entry.arrays[1]), tensors[0]
        table = np.array(self._exchange([array.shape[0], *splits.tolist()]))
        received = received_rows(entry.request.name, table, self._topology)
        shapes = [(int(received.sum()), *array.shape[1:])]

        def run(work: Work) -> None:
            self._backends[0].alltoall(array, work.targets(shapes)[0],
                                       *exchanged_elements(table, self._topology.rank, row_size(array.shape)))
            work.made.results.append(received.astype(splits.dtype))

        return shapes, run
