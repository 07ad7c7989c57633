"""The kernels on host memory, with numpy: what a launch does, from the same table."""

import ctypes

import numpy as np

from mpistrat.core.arithmetic import Scale
from mpistrat.core.tuning import COPY_BLOCK_ELEMENTS
from mpistrat.gpu.copy_kernel import CopyJob, block_count

from .dtypes import dtype_of


def memory_at(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memoryview(raw), dtype)


def guard(target: int, nbytes: int, lost: int) -> None:
    """Fill memory with bytes of ones if the number at the address `lost` is not 0."""
    if memory_at(lost, 1, np.dtype(np.uint32))[0]:
        memory_at(target, nbytes, np.dtype(np.uint8))[:] = 0xFF


def batched_copy(table: np.ndarray, job: CopyJob, lost: int = 0) -> None:
    """Do what each block does: find its piece, and copy its part of it, or fill that if it is lost."""
    source_dtype, target_dtype = dtype_of(job.source), dtype_of(job.target)
    if lost and memory_at(lost, 1, np.dtype(np.uint32))[0]:
        for piece in table:
            guard(int(piece["target"]), int(piece["count"]) * target_dtype.itemsize, lost)
        return
    for block in range(block_count(table)):
        piece = table[np.searchsorted(table["first_block"], block, side="right") - 1]
        start = (block - int(piece["first_block"])) * COPY_BLOCK_ELEMENTS
        count = min(int(piece["count"]) - start, COPY_BLOCK_ELEMENTS)
        source = memory_at(int(piece["source"]) + start * source_dtype.itemsize, count, source_dtype)
        target = memory_at(int(piece["target"]) + start * target_dtype.itemsize, count, target_dtype)
        if job.source == job.target:
            Scale(job.factor, job.divisor).apply(source, target)
            continue
        wide = source.astype(source_dtype if source_dtype.kind in "iu" else np.float32)
        Scale(job.factor, job.divisor).apply(wide, wide)
        target[...] = wide.astype(target_dtype)
