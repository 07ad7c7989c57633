"""A step of training on a GPU in virtual time: the executor is the real one, and work takes the time that it is told.

Three clocks: the host, which enqueues kernels of the backward pass and submits buckets; TensorFlow's one compute
stream; the streams of the engine. Nothing is computed: it shows what waits for what, and how long a step takes by that.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpistrat.core.handle import Entry, Handle
from mpistrat.core.interfaces import Observer
from mpistrat.core.request import DEVICE_GPU, ScaledOp, Sum, allreduce_request, specs_of
from mpistrat.core.settings import Settings
from mpistrat.core.topology import Topology
from mpistrat.gpu.arrays import Allocated, BucketList, GpuArray, GpuTensors
from mpistrat.gpu.gpu_executor import GpuExecutor
from tests.support.thread_group import ThreadGroup

FLOAT32 = np.dtype(np.float32)


class Device:
    """In place of mpistrat.gpu.device.Device. An all-reduce takes `collective_s`; all times are in seconds."""

    identity, checked_bytes = "virtual", 64

    def __init__(self, collective_s: float):
        self.now, self.collective_s = 0.0, collective_s
        self._numbers, self._addresses = itertools.count(1), itertools.count(2**20, 2**20)

    def run(self, stream: Any, seconds: float) -> None:
        """Enqueue work on a stream: it begins when that before it has ended, and not before now."""
        stream.until = max(stream.until, self.now) + seconds

    def current(self) -> Any:
        return nullcontext()

    def stream(self, is_urgent: bool = False) -> Any:
        return SimpleNamespace(ptr=next(self._numbers), until=0.0)

    def record(self, stream: Any) -> Any:
        return _Event(self, stream.ptr, next(self._numbers), max(stream.until, self.now))

    def wait(self, stream: Any, event: "_Event") -> None:
        stream.until = max(stream.until, event.at)

    def scratch(self, nbytes: int) -> GpuArray:
        return GpuArray(next(self._addresses), (nbytes,), np.dtype(np.uint8), None)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    def compile(self, job: object) -> None:
        """There is nothing to compile."""

    def batched_copy(self, *_: object) -> None:
        """It takes no time, like all work within the GPU."""

    guard = batched_copy

    def nccl_version(self) -> int:
        return 23203

    def unique_id(self) -> bytes:
        return b"x" * 128

    def communicator(self, *_: object) -> Any:
        def all_reduce(source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None:
            if count > 1:  # One element connects.
                self.run(self.streams[stream], self.collective_s)

        return SimpleNamespace(allReduce=all_reduce, check_async_error=lambda: None)

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        yield


class _Event:
    def __init__(self, device: Device, stream: int, number: int, at: float):
        self._device, self.stream, self.number, self.at = device, stream, number, at

    @property
    def done(self) -> bool:
        return self.at <= self._device.now


class Step:
    """A step of one rank. The host enqueues one thing after the other, a bucket `agreement_s` after its submission."""

    def __init__(self, collective_s: float, host_s: float, agreement_s: float):
        self.device, self._host_s, self._agreement_s = Device(collective_s), host_s, agreement_s
        self.compute, self.device.streams = self.device.stream(), {}
        make = self.device.stream

        def known(is_urgent: bool = False) -> Any:
            stream = make(is_urgent)
            self.device.streams[stream.ptr] = stream
            return stream

        self.device.stream = known
        self._executor = GpuExecutor(Topology(0, ("",)), ThreadGroup(1).data(0),
                                     Settings(nccl_streams=1, stall_check_disable=True, disable="shadow"), Observer(),
                                     clock=lambda: self.device.now)
        self._agreed: list[tuple[float, Entry]] = []

    def kernel(self, seconds: float) -> None:
        self._go_on(self.device.now + self._host_s)
        self.device.run(self.compute, seconds)

    def submit(self, name: str, bucket: tuple[BucketList, int] | None, reads: bool = True) -> tuple[Handle, GpuTensors]:
        """Submit a bucket; `reads`: the compute stream reads the result when the handle is done."""
        device: Any = self.device
        tensors = GpuTensors(device, [1], [(2,)], [FLOAT32], None, [self.compute], [self.compute] if reads else [],
                             lambda shapes: Allocated([2] * len(shapes), [None] * len(shapes), None))
        tensors.prepare(keeps_shapes=True)
        tensors.bucket = bucket
        request = allreduce_request(name, specs_of(tensors), ScaledOp(Sum), device=DEVICE_GPU)
        entry = Entry(request, tensors, Handle(name))
        self._agreed.append((device.now + self._agreement_s, entry))
        return entry.handle, tensors

    def await_all(self, handles: Sequence[Handle]) -> None:
        """The host goes on when these are done."""
        while not all(handle.is_done for handle in handles):
            self._go_on(max(self._agreed[0][0], self.device.now))

    def _go_on(self, until: float) -> None:
        while self._agreed and self._agreed[0][0] <= until:
            at, entry = self._agreed.pop(0)
            self.device.now = max(self.device.now, at)
            self._executor.execute([entry])
        self.device.now = max(self.device.now, until)


def seconds_of(way: Callable[[Step, int, Callable[[], None]], None], collective_s: float, buckets: int = 4,
               backward_s: float = 0.065, kernels: int = 160, host_s: float = 80e-6,
               agreement_s: float = 0.3e-3) -> float:
    """How long a step takes, by default one with the shape of ResNet-50: until the compute stream has all results.

    `way(step, buckets, backward)`: enqueues the step; `backward` enqueues what computes the next bucket.
    """
    step = Step(collective_s, host_s, agreement_s)

    def backward() -> None:
        for _ in range(kernels // buckets):
            step.kernel(backward_s / kernels)

    way(step, buckets, backward)
    step.kernel(0.0)
    return float(step.compute.until)


def at_once(step: Step, buckets: int, backward: Callable[[], None]) -> None:
    """The compute stream waits for each bucket as soon as it is enqueued."""
    _reduced(step, buckets, backward, lambda number: None)


def held_back(step: Step, buckets: int, backward: Callable[[], None]) -> None:
    """It waits when all of them are enqueued."""
    list_ = BucketList(buckets)
    _reduced(step, buckets, backward, lambda number: (list_, number))


def _reduced(step: Step, buckets: int, backward: Callable[[], None],
             bucket: Callable[[int], tuple[BucketList, int] | None]) -> None:
    handles = []
    for number in range(buckets):
        backward()
        handles.append(step.submit(str(number), bucket(number))[0])
    step.await_all(handles)


def started_and_awaited(step: Step, buckets: int, backward: Callable[[], None]) -> None:
    """A function that XLA has compiled: each bucket is submitted by a call, and another call behind the last waits."""
    started = []
    for number in range(buckets):
        backward()
        started.append(step.submit(str(number), None, reads=False))
    step.await_all([handle for handle, _ in started])
    for _, tensors in started:
        tensors.follow(step.compute)


def one_call(step: Step, buckets: int, backward: Callable[[], None]) -> None:
    """One call behind the backward pass, which waits for all buckets."""
    for _ in range(buckets):
        backward()
    step.await_all([step.submit(str(number), None)[0] for number in range(buckets)])
