"""The CUDA source of the kernel for blocks of 8-bit numbers, which has the bits of core/quantised.py, and its launches.

A block on the wire is its scale, and then its numbers. So consecutive blocks are consecutive bytes, whoever sends them.
Called by device.py.
"""

from typing import NamedTuple

import numpy as np

from ...core.quantised import BLOCK, FORMATS, LEAST, MOST, SCALE_BYTES

NAME = "quantised_sum"
BLOCK_BYTES = SCALE_BYTES + BLOCK
THREADS = 32  # A warp for each block: it exchanges the largest value without shared memory.


class QuantisedSum(NamedTuple):
    """A launch: adds up rows of floats, and then rows of 8-bit numbers, and writes the sum in one or two ways.

    All are of as many `blocks`. Addresses and the bytes from a row to the next are multiples of 4.
    """

    format: str  # A key of core.quantised.FORMATS.
    blocks: int
    # The address of the first row of floats, the rows, the bytes from one to the next, and how many floats of each row
    # count. The others are zero.
    floats: int = 0
    float_rows: int = 0
    float_step: int = 0
    filled: int = 0
    # Likewise of the rows of 8-bit numbers.
    wires: int = 0
    wire_rows: int = 0
    wire_step: int = 0
    # Where the sum goes: as floats; as 8-bit numbers. Addresses; 0: it does not. `total` may be where the floats are.
    total: int = 0
    wire: int = 0
    errors: int = 0  # The address of the errors, see Format.encode; 0: there are none.


_BODY = r"""
extern "C" __global__ void quantised_sum(
        unsigned long long floats, unsigned long long float_rows, unsigned long long float_step,
        unsigned long long filled, unsigned long long wires, unsigned long long wire_rows, unsigned long long wire_step,
        unsigned long long total, unsigned long long wire, unsigned long long errors) {
    const unsigned long long block = blockIdx.x, first = block * BLOCK;
    float values[BLOCK / THREADS] = {};
    for (unsigned long long row = 0; row < float_rows; row++) {
        const float* read = reinterpret_cast<const float*>(floats + row * float_step);
#pragma unroll
        for (int k = 0; k < BLOCK / THREADS; k++) {
            const unsigned long long i = first + k * THREADS + threadIdx.x;
            const float number = i < filled ? read[i] : 0.0f;
            values[k] = row ? __fadd_rn(values[k], number) : number;
        }
    }
    for (unsigned long long row = 0; row < wire_rows; row++) {
        const unsigned long long start = wires + row * wire_step + block * BLOCK_BYTES;
        const unsigned char* read = reinterpret_cast<const unsigned char*>(start);
        const float scale = *reinterpret_cast<const float*>(read);
#pragma unroll
        for (int k = 0; k < BLOCK / THREADS; k++) {
            const float number = __fmul_rn(number_of(read[SCALE_BYTES + k * THREADS + threadIdx.x]), scale);
            values[k] = row + float_rows ? __fadd_rn(values[k], number) : number;
        }
    }
    unsigned int most = LEAST;  // The bits of positive floats have their order, and those of NaN come last.
#pragma unroll
    for (int k = 0; k < BLOCK / THREADS; k++) {
        const unsigned long long i = first + k * THREADS + threadIdx.x;
        if (total) reinterpret_cast<float*>(total)[i] = values[k];
        if (errors) values[k] = __fadd_rn(reinterpret_cast<float*>(errors)[i], values[k]);
        const unsigned int magnitude = __float_as_uint(values[k]) & 0x7FFFFFFF;
        most = most > magnitude ? most : magnitude;
    }
    if (!wire) return;
    for (int distance = 16; distance; distance /= 2) {
        const unsigned int other = __shfl_xor_sync(0xFFFFFFFF, most, distance);
        most = most > other ? most : other;
    }
    const float scale = __fdiv_rn(__uint_as_float(most), LARGEST), inverse = __fdiv_rn(LARGEST, __uint_as_float(most));
    unsigned char* written = reinterpret_cast<unsigned char*>(wire + block * BLOCK_BYTES);
    if (threadIdx.x == 0) *reinterpret_cast<float*>(written) = scale;
#pragma unroll
    for (int k = 0; k < BLOCK / THREADS; k++) {
        const unsigned int place = k * THREADS + threadIdx.x;
        float rounded;
        written[SCALE_BYTES + place] = code_of(values[k], inverse, &rounded);
        if (errors)
            reinterpret_cast<float*>(errors)[first + place] =
                __uint_as_float(most) < __uint_as_float(MOST) ? __fsub_rn(values[k], __fmul_rn(rounded, scale)) : 0.0f;
    }
}
"""

# As Format._read and Format._round of each format. The functions with _rn are never contracted to a multiply-add.
_CODES = {"int8": r"""
__device__ float number_of(unsigned char code) { return (signed char) code; }
__device__ unsigned char code_of(float value, float inverse, float* rounded) {
    *rounded = rintf(__fmul_rn(value, inverse));
    return *rounded == *rounded ? (unsigned char) (int) *rounded : 0;
}
""", "fp8": r"""
__device__ float number_of(unsigned char code) {
    const unsigned int exponent = code >> 3 & 15, mantissa = code & 7;
    float number = __fmul_rn((float) mantissa, 0.001953125f);
    if (exponent) number = __uint_as_float(exponent + 120 << 23 | mantissa << 20);
    if ((code & 127) == 127) number = __uint_as_float(0x7FC00000);
    return code & 128 ? -number : number;
}
__device__ unsigned char code_of(float value, float inverse, float* rounded) {
    const float least = 0.015625f, quanta = 1572864.0f;
    const unsigned int least_bits = __float_as_uint(__fmul_rn(least, quanta));
    const unsigned int sign = __float_as_uint(value) & 0x80000000;
    const float scaled = __fmul_rn(__uint_as_float(__float_as_uint(value) ^ sign), inverse);
    float power = __uint_as_float(__float_as_uint(scaled) & 0x7F800000);
    power = __fmul_rn(power > least ? power : least, quanta);
    const float shifted = __fadd_rn(scaled, power);
    *rounded = __uint_as_float(__float_as_uint(__fsub_rn(shifted, power)) | sign);
    return __float_as_uint(shifted) - __float_as_uint(power) + (__float_as_uint(power) - least_bits >> 20)
        + (sign >> 24);
}
"""}


def source(format_: str) -> str:
    """The source of the kernel for a format. Its arguments are QuantisedSum's from `floats` on, as uint64.

    A launch has a warp for each block.
    """
    defines = {"BLOCK": BLOCK, "BLOCK_BYTES": BLOCK_BYTES, "SCALE_BYTES": SCALE_BYTES, "THREADS": THREADS,
               "LEAST": _bits(LEAST), "MOST": _bits(MOST), "LARGEST": f"{FORMATS[format_].largest:.1f}f"}
    return "".join(f"#define {name} {text}\n" for name, text in defines.items()) + _CODES[format_] + _BODY


def _bits(number: np.float32) -> str:
    return f"{number.view(np.uint32):#x}u"
