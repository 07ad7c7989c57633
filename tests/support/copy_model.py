"""The kernels on host memory, with numpy: what a launch does, from the same table or job."""

import ctypes

import numpy as np

from mpistrat.core.arithmetic import Scale
from mpistrat.core.quantised import BLOCK, SCALE_BYTES, formats, wire_bytes
from mpistrat.core.tuning import COPY_BLOCK_ELEMENTS
from mpistrat.gpu.copy.plan import CopyJob, block_count
from mpistrat.gpu.copy.quantise import BLOCK_BYTES, QuantisedSum

from .dtypes import dtype_of


def memory_at(address: int, count: int, dtype: np.dtype) -> np.ndarray:
    """The array over `count` elements of host memory."""
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def guard(table: np.ndarray, itemsize: int, lost: int) -> None:
    """Fill the targets with bytes of ones if the number at the address `lost` is not 0."""
    if memory_at(lost, 1, np.dtype(np.uint32))[0]:
        for piece in table:
            memory_at(int(piece["target"]), int(piece["count"]) * itemsize, np.dtype(np.uint8))[:] = 0xFF


def batched_copy(table: np.ndarray, job: CopyJob) -> None:
    """Do what each block does: find its piece, and copy its part of it."""
    source_dtype, target_dtype = dtype_of(job.source), dtype_of(job.target)
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


def quantised_sum(job: QuantisedSum) -> None:
    """Do what all blocks do, by core.quantised, whose bytes have all scales first."""
    codec, count, single = formats()[job.format], job.blocks * BLOCK, np.dtype(np.float32)
    total = np.empty(count, np.float32)
    for row in range(job.float_rows):
        numbers = np.zeros(count, np.float32)
        filled = min(job.filled, count)
        numbers[:filled] = memory_at(job.floats + row * job.float_step, filled, single)
        total = total + numbers if row else numbers
    for row in range(job.wire_rows):
        blocks = _blocks_at(job.wires + row * job.wire_step, job.blocks)
        wire = np.concatenate([blocks[:, :SCALE_BYTES].reshape(-1), blocks[:, SCALE_BYTES:].reshape(-1)])
        codec.decode(wire, total, adds=row + job.float_rows > 0)
    if job.total:
        memory_at(job.total, count, single)[:] = total
    if job.wire:
        wire = np.empty(wire_bytes(count), np.uint8)
        codec.encode(total, memory_at(job.errors, count, single) if job.errors else None, wire)
        blocks, scales = _blocks_at(job.wire, job.blocks), wire[:job.blocks * SCALE_BYTES]
        blocks[:, :SCALE_BYTES] = scales.reshape(job.blocks, SCALE_BYTES)
        blocks[:, SCALE_BYTES:] = wire[scales.size:].reshape(job.blocks, BLOCK)


def _blocks_at(address: int, blocks: int) -> np.ndarray:
    return memory_at(address, blocks * BLOCK_BYTES, np.dtype(np.uint8)).reshape(blocks, BLOCK_BYTES)
