"""The CUDA source of the batched copy kernel, and the tables that its launches get. device.py launches the kernel.

A launch packs tensors of a bucket into a fusion buffer, or unpacks them. It can also convert and scale the elements.
Its argument is a table. Each row is a piece, which is a tensor or a part of one: source, target, number of elements,
and first thread block. Tests execute the same tables with numpy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from ..core.memory import rounded_up
from ..core.tuning import COPY_BLOCK_ELEMENTS

# The row of one piece: addresses, number of elements, and first block. Its blocks end before those of the next row.
PIECE = np.dtype([("source", np.uint64), ("target", np.uint64), ("count", np.uint64), ("first_block", np.uint64)])
# A GPU thread can load and store 16 bytes at a time, if both addresses are multiples of 16.
ALIGNMENT = 16
# The rows of a table. The table is a parameter of the launch, and all parameters together may have 4 KB. So a launch
# needs no GPU memory, and a rank that is out of memory does not fail when other ranks wait for it in the collective.
PIECES_PER_LAUNCH = 120


@dataclass(frozen=True)
class CopyJob:
    """How elements are copied: they are multiplied by `factor / divisor`, and converted to the dtype `target`.

    The rules are those of arithmetic.Scale. Half precision is scaled in float32. Integers are divided exactly and
    truncated if the factor is 1, and otherwise scaled in float64.
    """

    source: str  # The names of dtypes in TYPES.
    target: str
    factor: float = 1.0
    divisor: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether bytes are copied unchanged."""
        return self.source == self.target and self.factor == 1.0 and self.divisor == 1


def copy_tables(sources: Sequence[int] | np.ndarray, targets: Sequence[int] | np.ndarray,
                counts: Sequence[int]) -> list[np.ndarray]:
    """Return one table for each launch. The launches copy `counts[i]` elements from `sources[i]` to `targets[i]`.

    Sources and targets are addresses. A table has at most PIECES_PER_LAUNCH rows. A count of 0 gets no row.
    """
    pieces = np.zeros(len(counts), PIECE)
    pieces["source"], pieces["target"], pieces["count"] = sources, targets, counts
    pieces = pieces[pieces["count"] > 0]
    tables = [pieces[start:start + PIECES_PER_LAUNCH] for start in range(0, len(pieces), PIECES_PER_LAUNCH)]
    for table in tables:
        blocks = _blocks(table)
        table["first_block"] = np.cumsum(blocks) - blocks
    return tables


def block_count(table: np.ndarray) -> int:
    """Return the number of thread blocks that a launch with this table needs."""
    return int(_blocks(table).sum())


class FusedCopies:
    """The launches that pack arrays of `counts` elements into a fusion buffer, and those that unpack them.

    Both methods return, for each launch, a table and the number of thread blocks. Launch before you call a method
    again, because that overwrites the tables. A launched kernel has its own copy of the table.
    """

    def __init__(self, counts: Sequence[int], memory_bytes: int, itemsize: int):
        # The bytes of an element in the arrays, and in the buffer. Tensors are aligned for the smaller of the two.
        offsets, self.total = fused_offsets(counts, min(memory_bytes, itemsize))  # total: Elements in the buffer.
        self._filled = None if 0 not in counts else np.flatnonzero(counts)
        self._offsets = np.asarray(self._of_filled(np.array(offsets, np.uint64) * np.uint64(itemsize)))
        nothing = np.zeros(len(counts), np.uint64)
        tables = copy_tables(nothing, nothing, counts)
        self._launches = [(table, block_count(table)) for table in tables]
        pieces = cast("np.ndarray", tables[0].base) if tables else np.zeros(0, PIECE)
        self._sources, self._targets = pieces["source"], pieces["target"]

    def to_buffer(self, sources: Sequence[int], buffer: int) -> list[tuple[np.ndarray, int]]:
        """Return the launches that pack the arrays at the addresses `sources` into the fusion buffer at `buffer`."""
        self._sources[:], self._targets[:] = self._of_filled(sources), self._offsets + np.uint64(buffer)
        return self._launches

    def from_buffer(self, buffer: int, targets: Sequence[int]) -> list[tuple[np.ndarray, int]]:
        """Return the launches that unpack the fusion buffer at `buffer` to the addresses `targets`."""
        self._sources[:], self._targets[:] = self._offsets + np.uint64(buffer), self._of_filled(targets)
        return self._launches

    def _of_filled(self, addresses: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        return addresses if self._filled is None else np.asarray(addresses, np.uint64)[self._filled]


def fused_offsets(counts: Sequence[int], itemsize: int) -> tuple[list[int], int]:
    """Return, in elements, the aligned offset of each tensor in a fusion buffer, and the total length."""
    step = max(ALIGNMENT // itemsize, 1)
    offsets, end = [], 0
    for count in counts:
        offsets.append(end)
        end += rounded_up(count, step)
    return offsets, end


def _blocks(table: np.ndarray) -> np.ndarray:
    return -(-table["count"].astype(np.int64) // COPY_BLOCK_ELEMENTS)


# -- the source in CUDA ------------------------------------------------------------------------------------------------

NAME, GUARD = "batched_copy", "guard"


class CType(NamedTuple):
    """A dtype in C: the type in memory, the type for arithmetic, and the functions that convert between them."""

    stored: str
    computed: str
    load: str = ""
    store: str = ""


TYPES = {
    "bool": CType("unsigned char", "unsigned long long"),
    "uint8": CType("unsigned char", "unsigned long long"), "int8": CType("signed char", "long long"),
    "uint16": CType("unsigned short", "unsigned long long"), "int16": CType("short", "long long"),
    "uint32": CType("unsigned int", "unsigned long long"), "int32": CType("int", "long long"),
    "uint64": CType("unsigned long long", "unsigned long long"), "int64": CType("long long", "long long"),
    "float16": CType("unsigned short", "float", "half_to_float", "float_to_half"),
    "bfloat16": CType("unsigned short", "float", "bfloat_to_float", "float_to_bfloat"),
    "float32": CType("float", "float"), "float64": CType("double", "double"),
}

# Inline assembly, so that compiling needs no CUDA header.
HALVES = r"""
__device__ float half_to_float(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ unsigned short float_to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
"""

_BODY = r"""
__device__ float bfloat_to_float(unsigned short bits) {
    union { unsigned int bits; float value; } wide;
    wide.bits = (unsigned int) bits << 16;
    return wide.value;
}
__device__ unsigned short float_to_bfloat(float value) {
    union { float value; unsigned int bits; } wide;
    wide.value = value;
    if (value != value) return (unsigned short) ((wide.bits >> 16) | 0x40);
    return (unsigned short) ((wide.bits + 0x7fff + ((wide.bits >> 16) & 1)) >> 16);
}

// NaN in floating-point numbers, -1 in integers.
__device__ void fill(void* target, unsigned long long nbytes) {
    for (unsigned long long i = threadIdx.x; i < nbytes; i += blockDim.x)
        reinterpret_cast<unsigned char*>(target)[i] = 0xFF;
}

struct Piece { unsigned long long source, target, count, first_block; };
struct Table { Piece pieces[PIECES_PER_LAUNCH]; };
// As many elements as the wider of the two dtypes has in ALIGNMENT bytes, loaded and stored at once.
constexpr int VECTOR_ELEMENTS = ALIGNMENT / (sizeof(SOURCE) > sizeof(TARGET) ? sizeof(SOURCE) : sizeof(TARGET));
struct alignas(VECTOR_ELEMENTS * sizeof(SOURCE)) SourceVector { SOURCE elements[VECTOR_ELEMENTS]; };
struct alignas(VECTOR_ELEMENTS * sizeof(TARGET)) TargetVector { TARGET elements[VECTOR_ELEMENTS]; };

__device__ TARGET converted(SOURCE element, double factor, long long divisor) {
#if IS_PLAIN
    return element;
#else
    const COMPUTED value = LOAD(element);
    return (TARGET) STORE(SCALED);
#endif
}

extern "C" __global__ void batched_copy(const Table table, int piece_count, double factor, long long divisor,
                                        const volatile unsigned int* lost) {
    __shared__ unsigned int is_lost;
    if (lost) {
        if (threadIdx.x == 0) is_lost = *lost;
        __syncthreads();
    }
    const unsigned long long block = blockIdx.x;
    int low = 0, high = piece_count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (table.pieces[middle].first_block <= block) low = middle; else high = middle - 1;
    }
    const Piece piece = table.pieces[low];
    const unsigned long long start = (block - piece.first_block) * BLOCK_ELEMENTS;
    const unsigned long long left = piece.count - start;
    const unsigned long long count = left < BLOCK_ELEMENTS ? left : BLOCK_ELEMENTS;
    const SOURCE* source = reinterpret_cast<const SOURCE*>(piece.source) + start;
    TARGET* target = reinterpret_cast<TARGET*>(piece.target) + start;
    if (lost && is_lost) {
        fill(target, count * sizeof(TARGET));
        return;
    }
    unsigned long long first = 0;
    if ((piece.source | piece.target) % ALIGNMENT == 0) {
        const unsigned long long vectors = count / VECTOR_ELEMENTS;
        const SourceVector* from = reinterpret_cast<const SourceVector*>(source);
        TargetVector* to = reinterpret_cast<TargetVector*>(target);
#pragma unroll 4
        for (unsigned long long i = threadIdx.x; i < vectors; i += blockDim.x) {
            const SourceVector read = from[i];
            TargetVector written;
#pragma unroll
            for (int k = 0; k < VECTOR_ELEMENTS; k++)
                written.elements[k] = converted(read.elements[k], factor, divisor);
            to[i] = written;
        }
        first = vectors * VECTOR_ELEMENTS;
    }
#pragma unroll 4
    for (unsigned long long i = first + threadIdx.x; i < count; i += blockDim.x)
        target[i] = converted(source[i], factor, divisor);
}

extern "C" __global__ void guard(void* target, unsigned long long nbytes, const volatile unsigned int* lost) {
    if (*lost) fill(target, nbytes);
}
"""


def source(job: CopyJob) -> str:
    """Return the CUDA source of the kernel `batched_copy` for `job`, and of the kernel `guard`.

    The arguments of `batched_copy` are the table by value (PIECES_PER_LAUNCH rows), the number of rows in use (int32),
    the factor (float64), the divisor (int64), and the address of a flag (uint32 in pinned memory), or 0 for no flag. If
    the flag is set, the kernel fills the targets with bytes 0xFF (NaN). A launch needs `block_count` thread blocks.

    `guard`, which is the same for all jobs, fills memory in this way if a flag is set. Its arguments are the address
    and the size in bytes of the memory (uint64), and the address of the flag. A launch needs one thread block.
    """
    into, out_of = TYPES[job.target], TYPES[job.source]
    if job.factor == 1.0 and job.divisor == 1:
        scaled = "value"
    elif out_of.computed in ("float", "double"):
        scaled = f"(value * ({out_of.computed}) (factor / divisor))"
    elif job.factor == 1.0:
        scaled = f"(value / ({out_of.computed}) divisor)"
    else:
        scaled = "((double) value * (factor / divisor))"
    defines = {
        "SOURCE": out_of.stored, "TARGET": into.stored, "COMPUTED": out_of.computed, "LOAD(x)": f"{out_of.load}(x)",
        "STORE(x)": f"{into.store}(({into.computed}) (x))", "SCALED": scaled, "IS_PLAIN": int(job.is_plain),
        "ALIGNMENT": ALIGNMENT, "PIECES_PER_LAUNCH": PIECES_PER_LAUNCH, "BLOCK_ELEMENTS": f"{COPY_BLOCK_ELEMENTS}ull"}
    return "".join(f"#define {name} {text}\n" for name, text in defines.items()) + HALVES + _BODY


def variant(job: CopyJob) -> CopyJob:
    """Return the job that stands for all jobs with the same CUDA source. It is the key of the compiled kernels."""
    return CopyJob(job.source, job.target, 1.0 if job.factor == 1.0 else 2.0, 1 if job.divisor == 1 else 2)
