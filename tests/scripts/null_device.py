"""What mpistrat's own Python takes for GPU tensors: on a device whose calls cost nothing. A benchmark without a GPU.

    python tests/scripts/null_device.py             arrays
    python tests/scripts/null_device.py tensorflow  tensors in a tf.function

With `busy` another thread runs Python all the time, as one that loads data does.

Prints the least of several tenth percentiles, beside the time of an array on the CPU, which tells how fast the machine
is. The times that are wanted are those of a machine on which that takes 20 us.
"""

import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import mpistrat
from mpistrat.api import tensors as gpu_tensors
from mpistrat.api.tensors import KINDS, Cupy
from mpistrat.cli.bench import resnet50
from mpistrat.gpu import gpu_executor
from mpistrat.gpu.arrays import GpuArray

SHAPES = [tuple(shape) for shape in resnet50()]
FLOAT32 = np.dtype(np.float32)
CALLS: Counter[str] = Counter()
_NOTHING = nullcontext()


class Stream:
    _numbers = itertools.count(1)

    def __init__(self, ptr: int = 0):
        self.ptr = ptr or next(Stream._numbers)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        return


class Event:
    __slots__ = ("number", "stream")
    done = True

    def __init__(self, stream: int, number: int):
        self.stream, self.number = stream, number


class Array:
    """An array without memory, and its `data`, as cupy calls where that is."""

    __slots__ = ("__weakref__", "dtype", "ptr", "shape")
    device_id = 0

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype):
        self.ptr, self.shape, self.dtype = address, shape, dtype

    @property
    def data(self) -> "Array":
        return self


class Communicator:
    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: object) -> None:
            CALLS[name] += 1
        setattr(self, name, call)
        return call


class Device:
    """In place of mpistrat.gpu.device.Device: counts its calls."""

    number, identity, checked_bytes = 0, "null", 64

    def __init__(self) -> None:
        self._numbers, self._addresses = itertools.count(), itertools.count(0x7F0000000000, 2**28)
        self._user = Stream()

    def current(self) -> Any:
        return _NOTHING

    def stream(self, is_urgent: bool = False) -> Stream:
        return Stream()

    def current_stream(self) -> Stream:
        return self._user

    def stream_at(self, address: int) -> Stream:
        return Stream(address)

    def can_wait(self, stream: Stream) -> bool:
        return True

    def record(self, stream: Stream) -> Event:
        CALLS["record"] += 1
        return Event(stream.ptr, next(self._numbers))

    def wait(self, stream: Stream, event: Event) -> None:
        CALLS["wait"] += 1

    def empty_all(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype]) -> list[Array]:
        return [Array(next(self._addresses), shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def contiguous(self, array: Array) -> Array:
        return array

    def scratch(self, nbytes: int) -> GpuArray:
        return GpuArray(next(self._addresses), (nbytes,), np.dtype(np.uint8), None)

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def copy(self, *_: object) -> None:
        CALLS["copy"] += 1

    def compile(self, job: object) -> None:
        """There is nothing to compile."""

    def batched_copy(self, *_: object) -> None:
        CALLS["launch"] += 1

    def guard(self, *_: object) -> None:
        CALLS["launch"] += 1

    def nccl_version(self) -> int:
        return 23203

    def unique_id(self) -> bytes:
        return b"x" * 128

    def communicator(self, *_: object) -> Communicator:
        return Communicator()

    @contextmanager
    def nccl_group(self) -> Iterator[None]:
        yield


def took(call: Callable[[], object], repeats: int) -> float:
    """The tenth percentile, in microseconds."""
    for _ in range(20):
        call()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    seconds.sort()
    return seconds[repeats // 10] * 1e6


def in_turn(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The least of several rounds, in which the calls take turns: the load of a machine changes."""
    rounds = [{name: took(call, repeats) for name, call in calls.items()} for _ in range(8)]
    return {name: min(each[name] for each in rounds) for name in calls}


def arrays() -> None:
    """Collectives on arrays that go the way of cupy's."""
    device = Device()
    one, many, host = device.empty_all([(1000,)], [FLOAT32]), device.empty_all(SHAPES, [FLOAT32] * len(SHAPES)), \
        np.ones(1000, np.float32)
    found = in_turn({
        "an array of 4 KB on the CPU": lambda: mpistrat.allreduce(host, op=mpistrat.Sum, name="host"),
        "an array of 4 KB": lambda: mpistrat.allreduce(one[0], op=mpistrat.Sum, name="one"),
        f"{len(many)} arrays": lambda: mpistrat.grouped_allreduce(many, op=mpistrat.Sum, name="many")}, 100)
    CALLS.clear()
    mpistrat.grouped_allreduce(many, op=mpistrat.Sum, name="many")
    for name, us in found.items():
        print(f"{name}: {us:.0f} us")
    on_cpu, single, group = found.values()
    print(f"4 KB: {single:.0f} us (wanted: 35), {single / on_cpu:.2f} times the array on the CPU")
    print(f"{len(many)} arrays: {group - single:.0f} us more than one (wanted: 130), "
          f"{(group - single) / on_cpu:.1f} times the array on the CPU")
    print(f"calls of the device for {len(many)} arrays: {dict(CALLS)}")


def tensors() -> None:
    """The gradients of ResNet-50 in a tf.function: grouped, and 13 buckets of one tensor."""
    import tensorflow as tf
    # Two threads that take turns with Python's lock, beside the engine's, measure how a machine wakes threads.
    tf.config.threading.set_inter_op_parallelism_threads(1)

    import mpistrat.tensorflow as hvd
    from mpistrat.tensorflow.async_op import call_site, streams
    from mpistrat.tensorflow.graph import buckets
    from mpistrat.tensorflow.xla import context

    patches: list[tuple[Any, str, Any]] = [
        (streams, "stream_of_handler", lambda device, where: device.current_stream()),
        (streams, "check", lambda *_: None), (streams, "check_waiting", lambda *_: None),
        (call_site, "are_on_gpu", lambda tensors, process_set=0: True),
        (call_site, "device_of", lambda tensors, process_set=0: None if tf.executing_eagerly() or context.is_compiled()
         else "/device:CPU:0")]
    for module, name, value in patches:
        setattr(module, name, value)

    def step_of(shapes: Sequence[tuple[int, ...]], name: str) -> Callable[[], object]:
        with tf.device("CPU:0"):
            variables = [tf.Variable(tf.ones(shape)) for shape in shapes]

        @tf.function(jit_compile=False, autograph=False)
        def step() -> tf.Tensor:
            values = [tf.identity(variable) for variable in variables]
            if name:
                values = hvd.grouped_allreduce(values, name=name, op=hvd.Sum)
            return tf.add_n([tf.reshape(value, [-1])[0] for value in values])

        return lambda: step().numpy()

    buckets.GPU_BUCKET_BYTES = 2**30
    # Small ones: a GPU's allocator takes as long for all sizes, and the C library of the host does not.
    many = [(64,)] * len(SHAPES)
    calls = {"without": step_of(many, ""), "with": step_of(many, "grouped")}
    calls["with"]()
    buckets.GPU_BUCKET_BYTES, small = 4096, [(1024,)] * 13
    calls |= {"13 without": step_of(small, ""), "13 with": step_of(small, "bucket")}
    host = np.ones(1000, np.float32)
    calls["an array of 4 KB on the CPU"] = lambda: mpistrat.allreduce(host, op=mpistrat.Sum, name="host")
    found = in_turn(calls, 60)
    on_cpu, group = found["an array of 4 KB on the CPU"], found["with"] - found["without"]
    bucket = (found["13 with"] - found["13 without"]) / 13
    print(f"an array of 4 KB on the CPU: {on_cpu:.0f} us")
    print(f"{len(SHAPES)} gradients grouped: {group:.0f} us a step (wanted: 600), {group / on_cpu:.1f} times the array")
    print(f"a bucket of one tensor: {bucket:.0f} us (wanted: 60), {bucket / on_cpu:.2f} times the array")


def main() -> None:
    make: Any = Device
    gpu_tensors.make_device = lambda number: make()
    KINDS["__main__"] = Cupy()
    gpu_executor.check_waiting = lambda device, buffer: None
    os.environ["MPISTRAT_DISABLE"] = "shadow"  # There are no numbers.
    mpistrat.init()
    print(f"load {os.getloadavg()[0]:.0f}")
    if "busy" in sys.argv:
        threading.Thread(target=lambda: [sum(range(1000)) for _ in itertools.count()], daemon=True).start()
    (tensors if "tensorflow" in sys.argv else arrays)()
    mpistrat.shutdown()


if __name__ == "__main__":
    main()
