"""The CUDA source of the batched copy kernel, for each pair of dtypes and each kind of scale. See copy_plan.

Called by device.py.
"""

from dataclasses import dataclass

from ...core.tuning import COPY_BLOCK_ELEMENTS
from .copy_plan import ALIGNMENT, PIECES_PER_LAUNCH, CopyJob

NAME, GUARD = "batched_copy", "guard"


@dataclass(frozen=True)
class CType:
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
    """The source of the kernel for `job`.

    The arguments of `batched_copy` are the table by value (PIECES_PER_LAUNCH rows), the number of rows in use (int32),
    the factor (float64), the divisor (int64), and the address of a number in pinned memory, or 0: if the number is not
    0, the targets become NaN. A launch needs `block_count` blocks.

    `guard`, which is the same for all jobs, turns memory into NaN if the number is not 0. Its arguments are the address
    and the bytes of the memory (uint64), and the address of the number. A launch has one block.
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
    """A job with the same `source` for all factors and divisors, as a key for compiled kernels."""
    return CopyJob(job.source, job.target, 1.0 if job.factor == 1.0 else 2.0, 1 if job.divisor == 1 else 2)
