"""Backends whose ranks are threads of one process, each with an engine of its own."""

import mmap
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from mpistrat.core.arithmetic import Reduction, combine, pack, unpack
from mpistrat.core.signal_handlers import WakeUp
from mpistrat.transport.local import LocalControl, LocalData
from mpistrat.transport.shm.segment import ASLEEP, HostMemory, SharedMemoryAgreement


class ThreadControl(LocalControl):
    def __init__(self, group: "ThreadGroup", rank: int):
        self._group, self._rank, self._wake_up = group, rank, group.wake_events[rank]

    def send(self, rank: int, message: bytes) -> None:
        self._group.messages[rank].append((self._rank, message))
        self._group.wake_events[rank].set()

    def poll(self) -> list[tuple[int, bytes]]:
        messages = self._group.messages[self._rank]
        return [messages.popleft() for _ in range(len(messages))]


class ThreadData(LocalData):
    """Collectives among the threads of a ThreadGroup. Every thread reads the others' arrays between two barriers."""

    def __init__(self, group: "ThreadGroup", rank: int):
        super().__init__()
        self._group, self._rank = group, rank

    def _exchange(self, array: np.ndarray) -> list[np.ndarray]:
        group = self._group
        group.arrays[self._rank] = array
        group.barrier.wait()
        arrays = [a.copy() for a in group.arrays]
        group.barrier.wait()
        return arrays

    def allreduce(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction) -> None:
        packed = self._buffer.view(sum(source.size for source in sources), sources[0].dtype)
        pack(sources, packed, reduction.prescale)
        combine(self._exchange(packed), reduction.op, packed, reduction.scale)
        unpack(packed, targets)

    def allgather(self, source: np.ndarray, target: np.ndarray, counts: Sequence[int]) -> None:
        np.concatenate(self._exchange(source), out=target)

    def alltoall(self, source: np.ndarray, target: np.ndarray, sent: Sequence[int], received: Sequence[int],
                 largest: int) -> None:
        table = self._exchange(np.array(sent, np.int64))
        before = [int(row[:self._rank].sum()) for row in table]
        parts = [part[first:first + count] for part, first, count in zip(self._exchange(source), before, received)]
        np.concatenate(parts, out=target)

    def broadcast(self, array: np.ndarray, root_rank: int) -> None:
        np.copyto(array, self._exchange(array)[root_rank])


class ThreadGroup:
    """`size` ranks in one process, each in a thread; a single one has the backends of a job of one rank.

    `timeout_s`: Seconds in a barrier after which a collective fails with BrokenBarrierError, so that no test hangs.
    """

    def __init__(self, size: int, timeout_s: float = 60.0):
        self.size = size
        self.messages: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]  # to each rank
        self.wake_events = [WakeUp() for _ in range(size)]
        self.arrays = [np.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self._block = mmap.mmap(-1, HostMemory.size_for(size, 0))

    def control(self, rank: int) -> LocalControl:
        return ThreadControl(self, rank) if self.size > 1 else LocalControl()

    def data(self, rank: int) -> LocalData:
        return ThreadData(self, rank) if self.size > 1 else LocalData()

    def agreement(self, rank: int) -> SharedMemoryAgreement:
        memory = HostMemory(self._block, rank, range(self.size))
        memory.post(1, ASLEEP)  # Its events keep a wake-up, whether it sleeps or not.
        return SharedMemoryAgreement(memory, lambda other: self.wake_events[other].set())
