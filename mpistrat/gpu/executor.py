"""Executes negotiated entries of GPU tensors: enqueues their work, and completes their handles when the GPU is done.

The ranks choose the backend together before their first collective, when each of them knows its GPU.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..core.errors import EngineError, InvalidRequestError
from ..core.fusion import BucketPlans, FusionBucket
from ..core.handle import Entry, complete_all
from ..core.interfaces import DataPlane, DeviceExecutor, Recorder
from ..core.protocols import Array
from ..core.request import CollectiveType
from ..core.rows import exchanged_elements, received_rows, row_size, rows_of_ranks
from ..core.settings import Settings
from ..core.topology import Topology
from ..core.tuning import GPU_LOOK_S
from .arrays import GpuArray, GpuDevice, GpuEvent, GpuInput, RecordedStream
from .backend import GpuBackend, last_of_streams
from .connect import connect, exchange_over
from .nccl.claims import release
from .staged import StagedData
from .uploads import uploaded
from .watchdog import Watchdog

logger = logging.getLogger(__name__)


@dataclass
class _Batch:
    """Entries with their results. Their work was enqueued at the time `since`, and is complete after `ends`."""

    works: list[tuple[Entry, list[Any]]]
    ends: list[GpuEvent]
    since: float
    began: int


class GpuExecutor(DeviceExecutor):
    """Executes lists of entries that are the same on all ranks. See interfaces.DeviceExecutor. One thread at a time.

    Args:
        topology: The ranks.
        host: The data plane for CPU tensors of these ranks.
        settings: The same on all ranks.
        recorder: Gets the entries that are complete.
        clock: Seconds, from any origin.
    """

    def __init__(self, topology: Topology, host: DataPlane, settings: Settings, recorder: Recorder,
                 clock: Callable[[], float] = time.monotonic):
        self._recorder = recorder
        self._topology, self._host, self._settings, self._clock = topology, host, settings, clock
        self._rank, self._size = topology.rank, topology.size
        self._limit_s = settings.limit_s
        self._device: GpuDevice | None = None
        # NCCL if it can be used, then staging, which can do everything. Empty before the first tensor.
        self._backends: Sequence[GpuBackend] = ()
        self._plans = BucketPlans(topology.size)
        self._fusion_bytes = 0
        self.batches: deque[_Batch] = deque()
        self._underway: list[tuple[Entry, list[Any]]] = []
        self._logged: set[str] = set()
        self._exchange = exchange_over(host, topology.size)
        self._watchdog: Watchdog | None = None

    def execute(self, entries: Sequence[Entry], divisor: int | None = None) -> None:
        device = cast("GpuInput", entries[0].arrays[0]).device
        with device.current():
            if not self._backends:
                self._connect(device)
            with self._watchdog.guarding() if self._watchdog else nullcontext():
                self._enqueue(device, entries, divisor)

    def uploaded(self, arrays: Sequence[np.ndarray]) -> Sequence[Array]:
        if self._device is None:
            return super().uploaded(arrays)
        with self._device.current():
            return uploaded(self._device, arrays)

    def _enqueue(self, device: GpuDevice, entries: Sequence[Entry], divisor: int | None) -> None:
        # Kept in case of an exception, since the GPU may already use the memory.
        works = self._underway = []
        began = time.monotonic_ns()
        events = [array.ready for entry in entries for array in _inputs(entry) if array.ready is not None]
        streams: dict[int, RecordedStream] = {}
        runs: list[Callable[[list[Any]], None] | None] = []
        for entry in entries:
            # Allocate all results before the first collective. A rank that is short of memory then fails before the
            # others wait for it in a collective.
            try:
                shapes, run = self._planned(entry)
            except InvalidRequestError as error:  # The same on all ranks.
                entry.handle.fail(error)
                continue
            allocated = [array.allocate(shape) for array, shape in zip(_inputs(entry), shapes, strict=True)]
            works.append((entry, [array for array, _ in allocated]))
            runs.append(run)
            streams.update((stream.ptr, stream) for _, stream in allocated if stream is not None)
        events += [device.record(stream) for stream in streams.values()]
        events = last_of_streams(events)
        for backend in self._backends:
            backend.wait_for(events)
        for bucket in self._plans.plan([entry for entry, _ in works], self._fusion_bytes, divisor):
            self._run_bucket(bucket, works)
        for (_, results), run in zip(works, runs, strict=True):
            if run is not None:
                run(results)
        self._underway, now = [], self._clock()
        ends = [event for backend in self._backends for event in backend.finish()]
        self.batches.append(_Batch(works, ends, now, began))

    def poll(self) -> bool:
        if not self.batches:
            return False
        assert self._device is not None, "execute sets it"
        with self._device.current():
            finished = False
            while self.batches and all(end.done for end in self.batches[0].ends):
                batch, ended = self.batches.popleft(), time.monotonic_ns()
                complete_all((entry.handle, results) for entry, results in batch.works)
                for entry, _ in batch.works:
                    self._recorder.add(entry, batch.works[0][0].number, batch.began, ended)
                finished = True
            if not finished:
                self._check()
        return finished

    def drain(self) -> None:
        while self.batches:
            if not self.poll():
                time.sleep(GPU_LOOK_S)

    def unfinished(self) -> list[Entry]:
        return [entry for batch in self.batches for entry, _ in batch.works]

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
            logger.debug("rank %d: the GPU's work could not be given up", self._topology.job_rank, exc_info=True)

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
        nccl, self._fusion_bytes = connect(device, self._rank, self._size, self._exchange, self._host, self._settings,
                                           self)
        staged = StagedData(device, self._rank, self._host, self._limit_s)
        self._backends = (staged,) if nccl is None else (nccl, staged)
        if nccl is not None:
            self._watchdog = Watchdog(
                self._limit_s, nccl.revoke, self.abandon, f"NCCL has kept rank {self._topology.job_rank} waiting for "
                f"{self._limit_s:g} s; another rank may have died, or never begun")

    def _run_bucket(self, bucket: FusionBucket, works: Sequence[tuple[Entry, list[GpuArray]]]) -> None:
        sources = cast("list[GpuInput]", [works[place][0].arrays[i] for place, i in bucket.members])
        targets = [works[place][1][i] for place, i in bucket.members]
        backend, request = self._backends[0], bucket.request
        if request.kind is CollectiveType.BROADCAST:
            backend.broadcast(sources, targets, request.root_rank)
            return
        reason = backend.why_not(sources, bucket.reduction.op, request.wire_dtype)
        if reason:
            backend = self._backends[-1]
            self._log_once(f"some GPU tensors are staged through host memory: {reason}")
        backend.allreduce(sources, targets, bucket.reduction, request.wire_dtype)

    def _planned(self, entry: Entry) -> tuple[list[tuple[int, ...]], Callable[[list[Any]], None] | None]:
        """The shapes of an entry's results, and what enqueues its work, given these; None: it is fused with others.

        Collective, over the host.

        Raises:
            InvalidRequestError: On all ranks. The splits of an all-to-all do not fit.
        """
        kind = entry.request.kind
        if kind is CollectiveType.ALLGATHER:
            return self._planned_allgather(_inputs(entry))
        if kind is CollectiveType.REDUCESCATTER:
            return self._planned_reducescatter(entry)
        if kind is CollectiveType.ALLTOALL:
            return self._planned_alltoall(entry)
        return [array.shape for array in _inputs(entry)], None

    def _planned_allgather(self, arrays: Sequence[GpuInput]) -> tuple[list[tuple[int, ...]], Callable[..., None]]:
        rows = list(zip(*self._exchange([array.shape[0] for array in arrays]), strict=True))

        def run(results: list[GpuArray]) -> None:
            for array, result, counts in zip(arrays, results, rows, strict=True):
                elements = row_size(array.shape)
                self._backends[0].allgather(array, result, [count * elements for count in counts])

        return [(sum(counts), *array.shape[1:]) for array, counts in zip(arrays, rows, strict=True)], run

    def _planned_reducescatter(self, entry: Entry) -> tuple[list[tuple[int, ...]], Callable[..., None]]:
        arrays = _inputs(entry)
        rows = [rows_of_ranks(array.shape[0], self._size) for array in arrays]

        def run(results: list[GpuArray]) -> None:
            reduction = self._plans.reduction(entry.request)
            for array, result, counts in zip(arrays, results, rows, strict=True):
                elements = row_size(array.shape)
                backend = self._backends[-1 if self._backends[0].why_not_scatter(array, reduction) else 0]
                backend.reducescatter(array, result, [count * elements for count in counts], reduction)

        return [(counts[self._rank], *array.shape[1:]) for array, counts in zip(arrays, rows, strict=True)], run

    def _planned_alltoall(self, entry: Entry) -> tuple[list[tuple[int, ...]], Callable[..., None]]:
        array, splits = cast("tuple[GpuInput, np.ndarray]", entry.arrays)
        table = np.array(self._exchange([array.shape[0], *splits.tolist()]))
        received = received_rows(entry.request.name, table, self._topology)

        def run(results: list[GpuArray | np.ndarray]) -> None:
            self._backends[0].alltoall(array, cast("GpuArray", results[0]),
                                       *exchanged_elements(table, self._rank, row_size(array.shape)))
            results.append(received.astype(splits.dtype))

        return [(int(received.sum()), *array.shape[1:])], run

    def _check(self) -> None:
        for backend in self._backends:
            backend.check()
        batch = self.batches[0]
        waited_s = self._clock() - batch.since
        if self._limit_s and waited_s > self._limit_s:
            names = ", ".join(entry.request.name for entry, _ in batch.works[:5])
            raise EngineError(f"the GPU of rank {self._topology.job_rank} has not done {names} in {waited_s:.0f} s; "
                              "another rank may have died, or never begun")

    def _log_once(self, text: str) -> None:
        """Log a text once, on rank 0."""
        if self._rank == 0 and text not in self._logged:
            self._logged.add(text)
            logger.info("rank 0: %s", text)


def _inputs(entry: Entry) -> list[GpuInput]:
    """The tensors of an entry that are on the GPU: all but the splits of an all-to-all."""
    return [array for array in entry.arrays if isinstance(array, GpuInput)]
