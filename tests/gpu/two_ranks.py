"""Checks collectives on cupy arrays among all ranks, with the backend that `auto` chooses, and with staging.

    mpistrat run -np 2 -- python -m tests.gpu.two_ranks

If there is one GPU, the ranks share it. NCCL can do this from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrat
from mpistrat.api import tensors as gpu_tensors
from mpistrat.api.tensors import KINDS, Cupy
from tests.gpu.counted import say_events
from tests.gpu.memory import DTYPES, can_test
from tests.support.dtypes import dtype_of

if TYPE_CHECKING:
    from mpistrat.gpu.device import Device

say_events()


class Gpu:
    """This rank's GPU, and cupy's arrays on it."""

    number = 0

    def __init__(self) -> None:
        import cupy
        self._cupy = cupy
        self.number = mpistrat.local_rank() % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.number).use()
        self.name = cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()

    @property
    def device(self) -> "Device":
        """The Device that the engine uses. Each init() makes a new one."""
        return gpu_tensors.this_ranks_gpu(self.number)

    def array(self, values: np.ndarray) -> Any:
        """Return a copy of `values` on the GPU. Copies bytes, because cupy has no kernels for some dtypes."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self._cupy.asarray(flat).view(values.dtype).reshape(values.shape)

    def values(self, array: Any) -> np.ndarray:
        """Return a copy of `array` on the host."""
        return np.asarray(self._cupy.asnumpy(array))


class StandIn(Gpu):
    def __init__(self) -> None:
        from tests.support import gpu_stand_in
        make: Any = gpu_stand_in.Device
        self.name = "stand-in, no GPU"
        gpu_tensors.make_device = lambda number: make(seed=mpistrat.rank())
        KINDS["tests"] = Cupy()

    def array(self, values: np.ndarray) -> Any:
        stand_in: Any = self.device
        return stand_in.tensor(values)

    def values(self, array: Any) -> np.ndarray:
        """Return a copy of `array`, an array of the stand-in, after the work in the caller's stream."""
        stand_in: Any = self.device
        stand_in.synchronize()
        return np.asarray(array.view().copy())


def check(gpu: Gpu) -> None:
    """Check reductions of every dtype, grouped averages, an all-gather, a broadcast and a reduce-scatter."""
    rank, size = mpistrat.rank(), mpistrat.size()

    def same(array: Any, expected: Any) -> None:
        np.testing.assert_allclose(gpu.values(array).astype(np.complex128), np.asarray(expected, np.complex128),
                                   rtol=1e-2)

    for name in filter(can_test, DTYPES):
        dtype = dtype_of(name)
        own = gpu.array((np.arange(300) % 2 if name == "bool" else np.arange(300) % 20 + rank).astype(dtype))
        base = np.arange(300) % 2 if name == "bool" else np.arange(300) % 20
        if name == "bool":
            same(mpistrat.allreduce(own, op=mpistrat.Max, name=f"max/{name}"), base)
            continue
        same(mpistrat.allreduce(own, op=mpistrat.Sum, name=f"sum/{name}"), base * size + sum(range(size)))
        if dtype.kind not in "iu":
            for result in mpistrat.grouped_allreduce([own, own, own], op=mpistrat.Average, name=f"group/{name}"):
                same(result, base + (size - 1) / 2)
    rows = gpu.array(np.full((rank + 1, 2), rank, np.float32))
    same(mpistrat.allgather(rows, name="rows"), [[r, r] for r in range(size) for _ in range(r + 1)])
    same(mpistrat.broadcast(gpu.array(np.full(5, rank, np.int16)), size - 1, name="root"), [size - 1] * 5)
    part = mpistrat.reducescatter(gpu.array(np.ones((2 * size, 3), np.float32)), op=mpistrat.Sum, name="parts")
    same(part, np.full((2, 3), size))
    halves = gpu.array(np.full(4, 60000, np.float16))
    average = gpu.values(mpistrat.allreduce(halves, op=mpistrat.Average, name="large halves"))
    assert np.isfinite(average).all(), "the average of halves has overflowed"


def main() -> None:
    """Check the backend that `auto` chooses, which rank 0 logs, and then the staged backend."""
    os.environ["MPISTRAT_LOG_LEVEL"] = "info"
    for operations in ("auto", "staged"):
        os.environ["MPISTRAT_GPU_OPERATIONS"] = operations
        mpistrat.init()
        check(StandIn() if "--stand-in" in sys.argv else Gpu())
        if mpistrat.rank() == 0:
            print(f"{operations}: all collectives are right on {mpistrat.size()} ranks", flush=True)
        mpistrat.shutdown()


if __name__ == "__main__":
    main()
