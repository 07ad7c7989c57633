"""How much of a slow network a step of ResNet-50 hides, on one GPU: a kernel that spins takes the place of the network.

    python -m tests.gpu.overlap

Behind each all-reduce of a bucket the GPU spins for so many milliseconds, on the stream of the collectives. A step is
timed in two orders: TensorFlow's stream waits for all buckets of a list together, as the package does, and for each
one at once. With --stand-in it runs on the CPU with a small model, without spinning.
"""

from collections.abc import Callable
from typing import Any

import mpistrat.keras as hvd
from mpistrat.gpu.gpu_executor import GpuExecutor
from mpistrat.gpu.nccl_data import NcclStream
from mpistrat.tensorflow.graph import buckets
from tests.gpu.price import IS_STAND_IN, training

TIMES_MS = (0.3,) if IS_STAND_IN else (0.3, 1.0, 5.0, 20.0)
_KERNEL = """
extern "C" __global__ void spin(long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < nanoseconds);
}
"""


def spinning(milliseconds: float) -> Callable[..., None]:
    """NcclStream's method that reduces what is packed, with a kernel behind the reduction."""
    before = NcclStream._run
    if IS_STAND_IN:
        return before
    import cupy
    spin = cupy.RawKernel(_KERNEL, "spin")

    def run(self: Any, pack: Callable, reduce: Callable, unpack: Callable) -> None:
        def reduce_and_spin() -> None:
            reduce()
            with self._reductions:
                spin((1,), (1,), (int(milliseconds * 1e6),))

        before(self, pack, reduce_and_spin, unpack)

    return run


def main() -> None:
    """Measure and print everything."""
    hvd.init()
    held_back, plain = GpuExecutor._due, NcclStream._run
    without = {is_compiled: training(False, is_compiled) for is_compiled in (False, True)}
    for milliseconds in TIMES_MS:
        NcclStream._run = spinning(milliseconds)  # type: ignore[method-assign]
        for is_compiled in (False, True):
            found = []
            for at_once in (False, True):
                # Compiled, at once means one bucket behind the backward pass.
                GpuExecutor._due = (lambda self, list_, batch: [[batch]]) if at_once else held_back  # type: ignore[method-assign]
                small, buckets.GPU_BUCKET_BYTES = buckets.GPU_BUCKET_BYTES, 2**40 if at_once and is_compiled else 2**25
                found.append(training(True, is_compiled))
                buckets.GPU_BUCKET_BYTES = small
            print(f"{milliseconds:g} ms a bucket, {'compiled' if is_compiled else 'not compiled'}: {found[0]:.1f} ms "
                  f"together, {found[1]:.1f} at once, {without[is_compiled]:.1f} without averaging", flush=True)
    GpuExecutor._due, NcclStream._run = held_back, plain  # type: ignore[method-assign]
    hvd.shutdown()


if __name__ == "__main__":
    main()
