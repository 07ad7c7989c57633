"""Compares the copy kernel on a GPU with its numpy model, for every CopyJob: python -m tests.gpu.kernel."""

import sys
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.core.tuning import COPY_BLOCK_ELEMENTS
from mpistrat.gpu.backend import await_on_host
from mpistrat.gpu.copy_kernel import PIECES_PER_LAUNCH, TYPES, CopyJob, block_count, copy_tables
from tests.gpu.memory import LIMIT_S, can_test, download, open_device, upload
from tests.support import copy_model
from tests.support.dtypes import dtype_of

if TYPE_CHECKING:
    from mpistrat.gpu.device import Device

# No result leaves the range of its dtype: what becomes of it then differs between a GPU and a CPU.
SCALES = ((1.0, 1), (0.5, 3), (1.0, 3), (2.0, 1))
CONVERSIONS = (("int16", "int32"), ("int32", "int16"), ("uint16", "uint32"), ("uint32", "uint16"),
               ("float32", "float16"), ("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32"),
               ("float64", "float16"), ("float16", "float64"), ("float64", "bfloat16"), ("bfloat16", "float64"),
               ("float64", "float32"), ("float32", "float64"))
# More pieces than a launch takes, of all kinds of lengths.
COUNTS = [1, 3, 17, COPY_BLOCK_ELEMENTS, COPY_BLOCK_ELEMENTS + 5, *([7] * PIECES_PER_LAUNCH)]
GUARD = 0xA5


def jobs() -> list[CopyJob]:
    """Return a CopyJob for every pair of dtypes that the NCCL backend uses and every kind of scale."""
    pairs = [(name, name) for name in TYPES if can_test(name)]
    pairs += [pair for pair in CONVERSIONS if can_test(pair[0]) and can_test(pair[1])]
    return [CopyJob(source, target, *scale) for source, target in pairs for scale in SCALES
            if source != "bool" or scale == (1.0, 1)]


def values(dtype: np.dtype) -> np.ndarray:
    """Return whole numbers, negative ones too if the dtype has any, and subnormal numbers in float32 and float64."""
    numbers = np.arange(sum(COUNTS)) % 97 - (0 if dtype.kind in "ub" else 40)
    result = (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype)
    if dtype.name in ("float32", "float64"):
        result[5::97] = np.finfo(dtype).smallest_subnormal * 1000
    return np.asarray(result)


def tolerance(job: CopyJob) -> float:
    """Return the largest relative difference from the model: 0, except for scaled float64, whose rounding differs."""
    if job.source != "float64" or (job.factor, job.divisor) == (1.0, 1):
        return 0.0
    return {"float64": 1e-15, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[job.target]


def check(device: "Device", job: CopyJob, shift: int) -> None:
    """Raise AssertionError if kernel and model have different results. `shift`: Bytes after an aligned address."""
    from_dtype, to_dtype = dtype_of(job.source), dtype_of(job.target)
    given = values(from_dtype)
    ends = np.cumsum(COUNTS)
    starts = (ends - COUNTS).tolist()
    empty = np.full(given.size * to_dtype.itemsize + 64, GUARD, np.uint8)
    source, target = upload(device, given, shift), upload(device, empty, shift)
    for table in copy_tables([source.address + start * from_dtype.itemsize for start in starts],
                             [target.address + start * to_dtype.itemsize for start in starts], COUNTS):
        stream = device.stream()
        device.batched_copy(table, block_count(table), job, stream)
        await_on_host(device.record(stream), LIMIT_S)
    raw = download(device, target)
    nbytes = given.size * to_dtype.itemsize
    assert (raw[nbytes:] == GUARD).all(), "it wrote behind the last piece"
    expected = np.zeros(given.size, to_dtype)
    for table in copy_tables([given.ctypes.data], [expected.ctypes.data], [given.size]):
        copy_model.batched_copy(table, job)
    by_kernel = raw[:nbytes].view(to_dtype)
    np.testing.assert_allclose(by_kernel.astype(np.float64), expected.astype(np.float64), rtol=tolerance(job), atol=0)


def main() -> None:
    """Check all jobs (with --few: every thirteenth), on aligned and unaligned memory. Then print those that failed."""
    device, failed = open_device(), []
    chosen = jobs()[::13] if "--few" in sys.argv else jobs()  # compute-sanitizer takes long
    with device.current():
        for job in chosen:
            for shift in (0, 8):
                try:
                    check(device, job, shift)
                except AssertionError as error:
                    failed.append(f"{job}, shifted by {shift}: {error}")
    print("\n".join([*failed, f"{len(chosen)} jobs, {len(failed)} differences from the model"]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
