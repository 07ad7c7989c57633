"""Packing and unpacking on a GPU: the plan, its model in numpy, and the kernel itself, compiled for this machine."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mpistrat.core.arithmetic import Scale
from mpistrat.core.tuning import COPY_BLOCK_ELEMENTS
from mpistrat.gpu.copy_kernel import (
    ALIGNMENT,
    HALVES,
    PIECE,
    PIECES_PER_LAUNCH,
    CopyJob,
    block_count,
    copy_tables,
    fused_offsets,
    source,
    variant,
)
from tests.gpu import kernel
from tests.support import copy_model
from tests.support.dtypes import dtype_of
from tests.support.nvrtc import ptx_of

JOBS = kernel.jobs()
COUNTS = (1, 3, 0, COPY_BLOCK_ELEMENTS, 17, COPY_BLOCK_ELEMENTS + 5)
each_job = pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.source}-{job.target}-{job.factor}-{job.divisor}")


def values(dtype: np.dtype, count: int) -> np.ndarray:
    numbers = np.arange(count) % 97 - (0 if dtype.kind in "ub" else 40)
    return (numbers % 2 if dtype.kind == "b" else numbers).astype(dtype)


def copied(job: CopyJob, run: Callable[[np.ndarray, CopyJob], None], shift: int = 0) -> list[np.ndarray]:
    """What a launch over pieces of all COUNTS leaves; their memory begins `shift` bytes from where it is aligned."""
    from_dtype, to_dtype = dtype_of(job.source), dtype_of(job.target)
    sources = [np.empty(count * from_dtype.itemsize + 64, np.uint8) for count in COUNTS]
    targets = [np.full(count * to_dtype.itemsize + 64, 0xA5, np.uint8) for count in COUNTS]
    at = [[-array.ctypes.data % ALIGNMENT + shift for array in arrays] for arrays in (sources, targets)]
    for array, start, count in zip(sources, at[0], COUNTS):
        array[start:start + count * from_dtype.itemsize].view(from_dtype)[:] = values(from_dtype, count)
    table, = copy_tables([a.ctypes.data + s for a, s in zip(sources, at[0])],
                       [a.ctypes.data + s for a, s in zip(targets, at[1])], COUNTS)
    run(table, job)
    results = []
    for array, start, count in zip(targets, at[1], COUNTS):
        stop = start + count * to_dtype.itemsize
        assert (array[:start] == 0xA5).all() and (array[stop:] == 0xA5).all(), "it wrote beside a piece"
        results.append(array[start:stop].view(to_dtype).copy())
    return results


# -- the plan ---------------------------------------------------------------------------------------------------------


def test_blocks_are_given_out_in_the_order_of_the_pieces_that_have_elements() -> None:
    table, = copy_tables([1, 2, 3, 4, 5], [0] * 5, [1, 0, COPY_BLOCK_ELEMENTS, COPY_BLOCK_ELEMENTS + 1, 5])
    assert table["source"].tolist() == [1, 3, 4, 5]
    assert table["first_block"].tolist() == [0, 1, 2, 4]
    assert block_count(table) == 5
    assert copy_tables([1], [2], [0]) == []


def test_pieces_that_do_not_fit_into_a_table_get_another_one() -> None:
    counts = [COPY_BLOCK_ELEMENTS + 1] * (2 * PIECES_PER_LAUNCH + 1)
    tables = copy_tables(range(len(counts)), range(len(counts)), counts)
    assert [len(table) for table in tables] == [PIECES_PER_LAUNCH, PIECES_PER_LAUNCH, 1]
    assert [table["first_block"][0] for table in tables] == [0, 0, 0]
    assert np.concatenate([table["source"] for table in tables]).tolist() == list(range(len(counts)))


def test_a_table_and_the_other_parameters_fit_into_the_4_kb_of_a_launch() -> None:
    assert PIECES_PER_LAUNCH * PIECE.itemsize + 24 <= 4096


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_tensor_begins_aligned_in_the_fusion_buffer(itemsize: int) -> None:
    offsets, total = fused_offsets(COUNTS, itemsize)
    assert all(offset * itemsize % ALIGNMENT == 0 for offset in offsets)
    assert all(offset + count <= end for offset, count, end in zip(offsets, COUNTS, [*offsets[1:], total]))
    assert total * itemsize < sum(COUNTS) * itemsize + ALIGNMENT * len(COUNTS)


# -- the model --------------------------------------------------------------------------------------------------------


@each_job
def test_the_model_scales_as_the_paths_for_cpu_tensors_do(job: CopyJob) -> None:
    for result, count in zip(copied(job, copy_model.batched_copy), COUNTS):
        wide = values(dtype_of(job.source), count).astype(
            np.float64 if job.source in ("float16", "bfloat16", "float32", "float64") else job.source)
        Scale(job.factor, job.divisor).apply(wide, wide)
        # Half precision is scaled in float32, whatever it becomes.
        names = (job.target, "float32" if job.source.endswith("float16") else job.source)
        tolerance = max({"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}.get(name, 1e-12) for name in names)
        np.testing.assert_allclose(result.astype(np.float64),
                                   wide.astype(dtype_of(job.target)).astype(np.float64), rtol=tolerance)


# -- the kernel's source ----------------------------------------------------------------------------------------------

# One thread does the work of all threads of a block, and the blocks come one after the other.
ON_HOST = """
#include <cstring>
#define __device__ static
#define __global__
#define __shared__ static
#define __syncthreads()
struct Index { unsigned int x; };
static Index blockIdx, threadIdx = {0}, blockDim = {1};
static float half_to_float(unsigned short bits) { _Float16 h; memcpy(&h, &bits, 2); return h; }
static unsigned short float_to_half(float value) {
    _Float16 h = value; unsigned short bits; memcpy(&bits, &h, 2); return bits; }
"""
LAUNCH = """
extern "C" void launch(const void* rows, int count, int blocks, double factor, long long divisor,
                       const unsigned int* lost) {
    NAMESPACE::Table table;
    memcpy(&table, rows, count * sizeof(NAMESPACE::Piece));
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        NAMESPACE::batched_copy(table, count, factor, divisor, lost);
}
extern "C" void guard_of_launch(void* target, unsigned long long nbytes, const unsigned int* lost) {
    NAMESPACE::guard(target, nbytes, lost);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[CopyJob, ctypes.CDLL]:
    """The kernels of all JOBS as functions of this machine, in one library."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    path: Path = tmp_path_factory.mktemp("kernel") / "kernels.cpp"
    variants = list(dict.fromkeys(variant(job) for job in JOBS))
    text = ON_HOST
    for number, job in enumerate(variants):
        body = source(job).replace(HALVES, "").replace('extern "C" ', "")
        launch = LAUNCH.replace("NAMESPACE", f"k{number}").replace("launch", f"launch{number}")
        names = re.findall(r"^#define (\w+)", body, re.MULTILINE)
        text += f"namespace k{number} {{\n{body}\n}}\n{launch}" + "".join(f"#undef {name}\n" for name in names)
    path.write_text(text)
    built = path.with_suffix(".so")
    made = subprocess.run([compiler, "-w", "-std=c++17", "-O1", "-shared", "-fPIC", str(path), "-o", str(built)],
                          text=True, capture_output=True, check=False)
    if "_Float16" in made.stderr:
        pytest.skip("this g++ has no half precision")
    assert made.returncode == 0, made.stderr
    library = ctypes.CDLL(str(built))
    launches = {job: getattr(library, f"launch{number}") for number, job in enumerate(variants)}
    for number, launch in enumerate(launches.values()):
        launch.guard = getattr(library, f"guard_of_launch{number}")
    return launches


@each_job
@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "not aligned"])
def test_the_kernel_does_what_the_model_does(job: CopyJob, shift: int, compiled: dict[CopyJob, ctypes.CDLL]) -> None:
    def launch(table: np.ndarray, job: CopyJob) -> None:
        compiled[variant(job)](ctypes.c_void_p(table.ctypes.data), len(table), block_count(table),
                               ctypes.c_double(job.factor), ctypes.c_longlong(job.divisor), None)

    for by_kernel, by_model in zip(copied(job, launch, shift), copied(job, copy_model.batched_copy, shift)):
        np.testing.assert_allclose(by_kernel.astype(np.float64), by_model.astype(np.float64),
                                   rtol=kernel.tolerance(job))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_guard_makes_nan_of_results_once_they_are_lost(dtype: str, compiled: dict[CopyJob, ctypes.CDLL]) -> None:
    results = [np.ones(count, dtype_of(dtype)) for count in (1, 300, 7)]
    given = [np.full_like(result, 2) for result in results]
    table, = copy_tables([each.ctypes.data for each in given], [result.ctypes.data for result in results],
                         [result.size for result in results])
    launch = compiled[CopyJob(dtype, dtype)]

    def unpack(lost: ctypes.c_uint) -> None:
        launch(ctypes.c_void_p(table.ctypes.data), len(table), block_count(table), ctypes.c_double(1.0),
               ctypes.c_longlong(1), ctypes.byref(lost))

    def guard(lost: ctypes.c_uint) -> None:
        for result in results:
            launch.guard(ctypes.c_void_p(result.ctypes.data), ctypes.c_ulonglong(result.nbytes), ctypes.byref(lost))

    for run in (unpack, guard):
        for lost in (0, 1):
            run(ctypes.c_uint(lost))
            assert [bool(np.isnan(result.astype(np.float64)).all()) for result in results] == [bool(lost)] * 3
            assert lost or run is guard or all((result == 2).all() for result in results)
        unpack(ctypes.c_uint(0))


@each_job
@pytest.mark.parametrize("architecture", ["compute_80", "compute_90"])
def test_the_kernel_compiles_for_a_gpu(job: CopyJob, architecture: str) -> None:
    ptx = ptx_of(source(job), architecture)
    assert ".entry batched_copy" in ptx
    assert ".ftz" not in ptx, "subnormal numbers would become zero"
    assert ".local" not in ptx, "each thread would copy the table"
    # 16 bytes at once, of the wider of the two dtypes.
    assert "ld.global.v" in ptx and "st.global.v" in ptx
