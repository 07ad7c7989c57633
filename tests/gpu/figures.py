"""Measures the path for GPU tensors, and prints rows for docs/speed.md. Every rank runs it.

See docs/testing-on-a-gpu.md.

    mpistrat run -np 2 -- python -m tests.gpu.figures
    python -m tests.gpu.figures

With --stand-in it runs without a GPU, in host memory, and its figures mean nothing.
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrat
from mpistrat.cli.bench import bert_base, resnet50
from mpistrat.gpu.backend import await_on_host
from mpistrat.gpu.copy_kernel import CopyJob, block_count, copy_tables, fused_offsets
from mpistrat.gpu.nccl_data import FLOAT32
from tests.gpu.memory import scratch
from tests.gpu.two_ranks import Gpu, StandIn

if TYPE_CHECKING:
    from mpistrat.gpu.device import Device

LIMIT_S = 60.0


def seconds_of(device: "Device", enqueue: Callable[[Any], Any], repeats: int) -> float:
    """Return the seconds of one operation if `repeats` operations are enqueued together. The median of five tries."""
    stream, took = device.stream(), []
    for _ in range(6):
        kept = []
        began = time.perf_counter()
        for _ in range(repeats):
            kept.append(enqueue(stream))
        await_on_host(device.record(stream), LIMIT_S)
        took.append((time.perf_counter() - began) / repeats)
    return statistics.median(took[1:])


def pack_and_unpack(gpu: Gpu, counts: list[int], repeats: int, wire: str = "float32", factor: float = 1.0) -> str:
    """Return a row that compares packing and unpacking a bucket with two copies of as many bytes within the GPU.

    The tensors are float32. Packing multiplies by `factor`, and converts to the dtype `wire`.
    """
    device, nbytes = gpu.device, 4 * sum(counts)
    itemsize = np.dtype(wire).itemsize
    offsets, total = fused_offsets(counts, itemsize)
    tensors, buffer = [scratch(device, 4 * count) for count in counts], scratch(device, 4 * total)
    addresses = [tensor.address for tensor in tensors]
    places = [buffer.address + itemsize * offset for offset in offsets]
    packs = [(table, CopyJob("float32", wire, factor)) for table in copy_tables(addresses, places, counts)]
    unpacks = [(table, CopyJob(wire, "float32")) for table in copy_tables(places, addresses, counts)]

    def both(stream: Any) -> None:
        for table, job in (*packs, *unpacks):
            device.batched_copy(table, block_count(table), job, stream)

    by_kernel = seconds_of(device, both, repeats)
    other = scratch(device, 4 * total)

    def copies(stream: Any) -> None:
        device.copy(other.address, buffer.address, nbytes, stream)
        device.copy(buffer.address, other.address, nbytes, stream)

    by_copies = seconds_of(device, copies, repeats)
    how = (f" as {wire}" if wire != "float32" else "") + (f" times {factor:g}" if factor != 1.0 else "")
    return (f"pack + unpack of {len(counts)} gradients{how}, {nbytes / 1e6:.0f} MB: {by_kernel * 1e6:.0f} us, "
            f"{2 * nbytes / by_kernel / 1e9:.0f} GB/s, {by_kernel / by_copies:.2f} times as long as two copies "
            "(wanted: at most 1.3)")


def step_of_many(gpu: Gpu, counts: list[int], steps: int) -> str:
    """Return a row on a step that averages many tensors: its time, and how often it calls methods of the device."""
    device, arrays, took = gpu.device, [gpu.array(np.ones(count, np.float32)) for count in counts], []
    calls = dict.fromkeys(("record", "wait", "scratch", "pinned", "batched_copy"), 0)

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(device, name)

        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return method(*arguments)
        return call

    for _ in range(4):  # Later steps repeat these, of which the first are also done on the CPU, and compared.
        mpistrat.grouped_allreduce(arrays, name="many")
    record = device.record
    for name in calls:
        setattr(device, name, counted(name))
    for _ in range(steps):
        began = time.perf_counter()
        mpistrat.grouped_allreduce(arrays, name="many")
        await_on_host(record(device.current_stream()), LIMIT_S)
        took.append(time.perf_counter() - began)
    for name in calls:
        delattr(device, name)
    per_step = ", ".join(f"{name} {number / steps:.0f}" for name, number in calls.items())
    return (f"step of {len(counts)} tensors, {4 * sum(counts) / 1e6:.0f} MB: {statistics.median(took) * 1e3:.2f} ms; "
            f"calls per step: {per_step} (wanted: no scratch, no pinned, and not 0 of all)")


def overhead_of_a_step(gpu: Gpu, elements: int, steps: int) -> str:
    """Return a row that compares an all-reduce by the engine with a direct call of NCCL for the same all-reduce."""
    device, array = gpu.device, gpu.array(np.ones(elements, np.float32))
    if mpistrat.size() > 1:
        return "overhead of a step above raw NCCL: run it with one rank"
    target, stream = scratch(device, 4 * elements), device.stream()
    communicator = device.communicator(1, device.unique_id(), 0)
    address = array.data.ptr
    took: dict[str, list[float]] = {"engine": [], "raw": []}
    for _ in range(steps):
        began = time.perf_counter()
        mpistrat.allreduce(array, op=mpistrat.Sum, name="step")
        await_on_host(device.record(device.current_stream()), LIMIT_S)
        took["engine"].append(time.perf_counter() - began)
        began = time.perf_counter()
        communicator.allReduce(address, target.address, elements, FLOAT32, 0, stream.ptr)
        await_on_host(device.record(stream), LIMIT_S)
        took["raw"].append(time.perf_counter() - began)
    communicator.destroy()
    engine, raw = (statistics.median(took[name][steps // 10:]) for name in ("engine", "raw"))
    return (f"a step of {4 * elements} bytes: {engine * 1e6:.0f} us, {(engine - raw) * 1e6:.0f} us above the raw call "
            "of NCCL (wanted: less than 150)")


def staged(gpu: Gpu, elements: int, steps: int) -> str:
    """Return a row that compares a staged all-reduce with the copies to the host and back alone, which overlap."""
    device, nbytes, array = gpu.device, 4 * elements, gpu.array(np.ones(elements, np.float32))
    took = []
    for _ in range(steps + 1):
        mpistrat.barrier()
        began = time.perf_counter()
        mpistrat.allreduce(array, op=mpistrat.Sum, name="staged")
        took.append(time.perf_counter() - began)
    seconds = statistics.median(took[1:])
    there, back = device.pinned(nbytes), device.pinned(nbytes)
    other, stream_back = scratch(device, nbytes), device.stream()
    mpistrat.barrier()

    def copies(stream: Any) -> None:
        device.copy(there.ctypes.data, array.data.ptr, nbytes, stream)
        device.copy(other.address, back.ctypes.data, nbytes, stream_back)
        device.wait(stream, device.record(stream_back))

    by_copies = seconds_of(device, copies, 1)
    return (f"staged all-reduce of {nbytes / 1e6:.0f} MB: {seconds * 1e3:.1f} ms, {nbytes / seconds / 1e9:.1f} GB/s, "
            f"{by_copies / seconds:.0%} of the bandwidth of the copies (wanted: at least 70 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stand-in", action="store_true", help="without a GPU; the figures say nothing")
    arguments = parser.parse_args()
    os.environ["MPISTRAT_LOG_LEVEL"] = "info"  # which says the way that tensors go
    mpistrat.init()
    gpu: Gpu = StandIn() if arguments.stand_in else Gpu()
    # The stand-in does what a GPU does a thousand times as fast.
    networks, repeats, steps = ([[(3, 5)] * 161, [(3, 5)] * 199], 1, 10) if arguments.stand_in else \
        ([resnet50(), bert_base()], 10, 2000)
    if mpistrat.size() > 1 and not arguments.stand_in:
        steps = 100  # Each collective waits until the GPU changes from one process to the other.
    counts_of = [[math.prod(shape) for shape in shapes] for shapes in networks]
    counts = counts_of[-1]
    with gpu.device.current():
        figures = [pack_and_unpack(gpu, each, repeats) for each in counts_of]
        figures += [pack_and_unpack(gpu, counts, repeats, "float32", 0.3),
                    pack_and_unpack(gpu, counts, repeats, "float16"),
                    pack_and_unpack(gpu, counts, repeats, "float16", 0.3)]
        figures += [step_of_many(gpu, each, max(steps // 100, 1)) for each in counts_of]
        figures.append(overhead_of_a_step(gpu, 1000, steps))
    mpistrat.shutdown()
    os.environ["MPISTRAT_GPU_OPERATIONS"] = "staged"
    mpistrat.init()
    with gpu.device.current():
        figures.append(staged(gpu, sum(counts), 5))
    if mpistrat.rank() == 0:
        print(f"{gpu.name}, {mpistrat.size()} ranks, NCCL {gpu.device.nccl_version()}")
        for figure in figures:
            print(f"| {figure} |")
    mpistrat.shutdown()


if __name__ == "__main__":
    main()
