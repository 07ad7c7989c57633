"""Measures how much network time a step of ResNet-50 hides, on one GPU. A kernel that spins stands for the network.

    python -m tests.gpu.overlap

After each all-reduce, on the stream of the collectives, the GPU spins for a given time per 32 MiB. A step is timed in
two ways: TensorFlow's stream waits for all buckets of a list together, as mpistrat does, or for each bucket as soon as
it is enqueued. With --stand-in the program runs on the CPU with a small model, without spinning.
"""

from collections.abc import Callable
from typing import Any

import mpistrat.keras as hvd
from mpistrat.gpu.gpu_executor import GpuExecutor
from mpistrat.gpu.nccl_data import NcclStream
from mpistrat.tensorflow.async_op import streams
from mpistrat.tensorflow.graph import buckets
from tests.gpu import price
from tests.gpu.counted import say_events

TIMES_MS = (0.3,) if price.IS_STAND_IN else (0.3, 1.0, 5.0, 20.0)
price.WARM_UP, price.STEPS = 3, 10  # In 90 s XLA compiles three functions, and 18 measurements run.
_KERNEL = """
extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""
spin_ms = 0.0  # The engine's thread reads it at each all-reduce.


def spinning() -> Callable[..., None]:
    """Return a method like NcclStream.reduce_packed that enqueues the spinning kernel after the all-reduce."""
    import cupy
    before, spin = NcclStream.reduce_packed, cupy.RawKernel(_KERNEL, "spin")

    def reduce_packed(self: Any, sources: Any, targets: Any, copies: Any, wire: Any, reduction: Any) -> None:
        before(self, sources, targets, copies, wire, reduction)
        with self._reductions:
            spin((1,), (1,), (int(spin_ms * 1e6 * copies.total * wire.itemsize / 2**25),))
        self._pending = self._device.record(self._reductions), self._pending[1]

    return reduce_packed


def main() -> None:
    global spin_ms
    say_events(streams)
    hvd.init()
    held_back = GpuExecutor._due
    if not price.IS_STAND_IN:
        NcclStream.reduce_packed = spinning()  # type: ignore[method-assign]
    for is_compiled in (False, True):
        without = price.milliseconds(price.training_step(False, is_compiled))
        steps = [price.training_step(True, is_compiled)] * 2
        steps[0]()
        if is_compiled:  # At once means one bucket behind the backward pass. The first call traces, and compiles.
            steps[1], buckets.GPU_BUCKET_BYTES = price.training_step(True, True), 2**40
            steps[1]()
            buckets.GPU_BUCKET_BYTES = 2**25
        for spin_ms in TIMES_MS:
            found = []
            for step, due in zip(steps, (held_back, lambda self, list_, batch: [[batch]]), strict=True):
                GpuExecutor._due = due  # type: ignore[method-assign, assignment]
                found.append(price.milliseconds(step))
            print(f"{spin_ms:g} ms for 32 MiB, {'compiled' if is_compiled else 'not compiled'}: {found[0]:.1f} ms "
                  f"together, {found[1]:.1f} at once, {without:.1f} without averaging", flush=True)
            GpuExecutor._due = held_back  # type: ignore[method-assign]
    hvd.shutdown()


if __name__ == "__main__":
    main()
