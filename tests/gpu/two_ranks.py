"""Collectives on GPU arrays among all ranks, by cupy alone, by each backend that can be used here.

    mpistrat run -np 2 -- python -m tests.gpu.two_ranks

With one GPU the ranks share it: by NCCL from 2.30 on with NCCL_MULTI_RANK_GPU_ENABLE=1, and else staged.
"""

import os
import sys
from typing import Any

import numpy as np

import mpistrat
from mpistrat.api import tensors as gpu_tensors
from mpistrat.api.tensors import KINDS, Cupy
from tests.gpu.counted import say_events
from tests.gpu.memory import DTYPES, can_test
from tests.support.dtypes import dtype_of

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
    def device(self) -> Any:
        """The one that the engine uses, which is another one after each init()."""
        return gpu_tensors.this_ranks_gpu(self.number)

    def array(self, values: np.ndarray) -> Any:
        """Copy to the GPU; as bytes, since cupy has no kernels for some dtypes."""
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self._cupy.asarray(flat).view(values.dtype).reshape(values.shape)

    def values(self, array: Any) -> np.ndarray:
        """Copy from the GPU."""
        return np.asarray(self._cupy.asnumpy(array))


class StandIn(Gpu):
    def __init__(self) -> None:
        from tests.support import gpu_stand_in
        make: Any = gpu_stand_in.Device
        self.name = "stand-in, no GPU"
        gpu_tensors.make_device = lambda number: make(seed=mpistrat.rank())
        KINDS["tests"] = Cupy()

    def array(self, values: np.ndarray) -> Any:
        return self.device.tensor(values)

    def values(self, array: Any) -> np.ndarray:
        """Copy from the stand-in, in the order of the caller's stream."""
        self.device.synchronize()
        return np.asarray(array.view().copy())


def check(gpu: Any) -> None:
    """Every dtype, summed, averaged, in a group; gathered, broadcast, scattered, exchanged."""
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
    """Check `auto`, which rank 0 logs, and then staging."""
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
