"""Execution of what the ranks have agreed on for tensors on GPUs: enqueued here, completed when the GPU is done.

Which way the tensors go is settled by all ranks together before their first collective, when it is known which GPU each
of them uses.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import EngineError
from ..core.fusion import FUSED, Bucket, BucketPlans
from ..core.handle import Entry, complete_all
from ..core.interfaces import DataPlane, DeviceExecutor
from ..core.request import CollectiveType
from ..core.settings import Settings
from .arrays import GpuArray
from .backend import Completion, GpuBackend
from .connect import connect, exchange_over
from .staged import StagedData
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

# A GPU is asked again and again at first, 15 to 20 us a time, for a sleep takes 50 us more than one asks for (the timer
# slack of Linux). That is a tenth of half a millisecond; from then on the engine sleeps for a sixteenth of the wait so
# far, which makes none much longer than it must be, but for a millisecond at most: 1,000 looks a second, 2 % of a core.
_AWAKE_S = 500e-6
_PAUSES = 16
_LONGEST_PAUSE_S = 1e-3


@dataclass
class _Batch:
    """Entries whose work the GPU has been given, at `since`, with their results."""

    works: list[tuple[Entry, list[GpuArray]]]
    completions: list[Completion]
    since: float


class GpuExecutor(DeviceExecutor):
    """Executes lists of entries of GPU tensors that are the same on all ranks. One thread at a time.

    Args:
        rank: This rank.
        size: How many ranks there are.
        host: Reduces CPU tensors of the same ranks.
        settings: The same on all ranks.
        clock: Seconds, from any origin.
    """

    def __init__(self, rank: int, size: int, host: DataPlane, settings: Settings,
                 clock: Callable[[], float] = time.monotonic):
        self._rank, self._size, self._host, self._settings, self._clock = rank, size, host, settings, clock
        self._limit_s = settings.limit_s
        self._device: Any = None
        # NCCL where it serves, and staging last, which can do everything; none before the first tensor.
        self._planes: Sequence[GpuBackend] = ()
        self._plans = BucketPlans(size)
        self._fusion_bytes = 0
        self._batches: deque[_Batch] = deque()
        self._underway: list[tuple[Entry, list[GpuArray]]] = []
        self._reasons: set[str] = set()
        self._exchange = exchange_over(host, size)
        self._watchdog: Watchdog | None = None
        self._progress = 0.0  # when the GPU was last given work while it had none, or last finished some

    @property
    def is_busy(self) -> bool:
        return bool(self._batches)

    def patience(self, now: float) -> float:
        waited_s = now - self._progress
        return 0.0 if waited_s < _AWAKE_S else min(waited_s / _PAUSES, _LONGEST_PAUSE_S)

    def execute(self, entries: Sequence[Entry]) -> None:
        device = next(entry.arrays[0] for entry in entries).device
        with device.current():
            if not self._planes:
                self._connect(device)
            with self._watchdog.guarding() if self._watchdog else nullcontext():
                self._enqueue(entries)

    def _enqueue(self, entries: Sequence[Entry]) -> None:
        # Kept here if what follows fails, since the GPU may be at some of it by then.
        works = self._underway = []
        events = {id(array.ready): array.ready for entry in entries for array in entry.arrays}
        for entry in entries:
            # All memory is taken before the first collective, so that a rank short of it fails before the others
            # wait for it there.
            made = [array.allocate(array.shape) for array in entry.arrays] if entry.request.kind in FUSED else []
            works.append((entry, [array for array, _ in made]))
            events |= {id(event): event for _, event in made}
        for plane in self._planes:
            plane.wait_for(events.values())
        for bucket in self._plans.plan(entries, self._fusion_bytes):
            self._run_bucket(bucket, works)
        for entry, results in works:
            if entry.request.kind is CollectiveType.ALLGATHER:
                results += self._allgather(entry.arrays)
        self._underway, now = [], self._clock()
        if not self._batches:
            self._progress = now
        self._batches.append(_Batch(works, [plane.finish() for plane in self._planes], now))

    def poll(self) -> bool:
        if not self._batches:
            return False
        with self._device.current():
            finished = False
            while self._batches and all(completion.done for completion in self._batches[0].completions):
                complete_all((entry.handle, results) for entry, results in self._batches.popleft().works)
                finished = True
            if finished:
                self._progress = self._clock()
            else:
                self._check()
        return finished

    def drain(self) -> None:
        while self._batches:
            if not self.poll():
                time.sleep(self.patience(self._clock()))

    def unfinished(self) -> list[Entry]:
        return [entry for batch in self._batches for entry, _ in batch.works]

    def abandon(self) -> None:
        if self._device is None:
            return
        if self._watchdog is not None:
            self._watchdog.close()
        try:
            with self._device.current():
                for plane in self._planes:
                    plane.abandon()
        except Exception:  # The failure that led here is the one to report; a GPU may fail for good after one.
            logger.debug("rank %d: the GPU's work could not be given up", self._rank, exc_info=True)

    def close(self) -> None:
        if not self._planes:
            return
        if self._watchdog is not None:
            self._watchdog.close()
        with self._device.current():
            self._exchange(None)  # No rank takes its communicator down while another one still uses it.
            for plane in self._planes:
                plane.close()
        self._planes = ()

    # -- how it is done -----------------------------------------------------------------------------------------------

    def _connect(self, device: Any) -> None:
        self._device = device
        nccl, self._fusion_bytes = connect(device, self._rank, self._size, self._exchange, self._host, self._settings)
        staged = StagedData(device, self._rank, self._host, self._limit_s)
        self._planes = (staged,) if nccl is None else (nccl, staged)
        if nccl is not None:
            self._watchdog = Watchdog(self._limit_s, self.abandon, f"NCCL has kept rank {self._rank} waiting for "
                                      f"{self._limit_s:g} s; another rank may have died, or never begun")

    def _run_bucket(self, bucket: Bucket, works: Sequence[tuple[Entry, list[GpuArray]]]) -> None:
        sources = [works[place][0].arrays[i] for place, i in bucket.members]
        targets = [works[place][1][i] for place, i in bucket.members]
        plane, request = self._planes[0], bucket.request
        if request.kind is CollectiveType.BROADCAST:
            plane.broadcast(sources, targets, request.root_rank)
            return
        reason = plane.why_not(sources, bucket.reduction.op, request.wire)
        if reason:
            plane = self._planes[-1]
            self._say(f"some GPU tensors are staged through host memory: {reason}")
        plane.allreduce(sources, targets, bucket.reduction, request.wire)

    def _allgather(self, arrays: Sequence[Any]) -> list[GpuArray]:
        plane = self._planes[0]
        rows = self._exchange([array.shape[0] for array in arrays])
        results = []
        for i, array in enumerate(arrays):
            counts = [of_rank[i] for of_rank in rows]
            row_size = int(np.prod(array.shape[1:], dtype=np.int64))
            result, event = array.allocate((sum(counts), *array.shape[1:]))
            plane.wait_for([event])
            plane.allgather(array, result, [count * row_size for count in counts])
            results.append(result)
        return results

    def _check(self) -> None:
        for plane in self._planes:
            plane.check()
        batch = self._batches[0]
        waited_s = self._clock() - batch.since
        if self._limit_s and waited_s > self._limit_s:
            names = ", ".join(entry.request.name for entry, _ in batch.works[:5])
            raise EngineError(f"the GPU of rank {self._rank} has not done {names} in {waited_s:.0f} s; another rank "
                              "may have died, or never begun")

    def _say(self, text: str) -> None:
        """Log a line once, on rank 0."""
        if self._rank == 0 and text not in self._reasons:
            self._reasons.add(text)
            logger.info("%s", text)
