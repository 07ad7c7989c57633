"""Blocks of 8-bit numbers with a scale each: what goes between hosts with `Compression.int8` and `Compression.fp8`.

A block is BLOCK consecutive values. Its scale is the largest absolute value, divided by the largest number of the
format. The values are divided by the scale and rounded to the nearest number, ties to even. What was rounded off is
added to the next values of the same tensor (error feedback: Seide et al., 1-bit SGD, 2014; Karimireddy et al., arXiv
1901.09847). Nothing is random, so the same values have the same bytes.

A block with a NaN or an infinity has a scale that is neither finite, and so no value of it is finite where it is read.

Pure. Used by the engine's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .memory import rounded_up
from .tuning import QUANTISED_BATCH_BLOCKS

BLOCK = 256
SCALE_BYTES = 4
# A block of smaller values is sent with this largest value: no scale, and no inverse of one, leaves the normal floats.
LEAST = np.float32(1e-35)
MOST = np.float32(3e38)  # and from here on the product with the scale may overflow


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the sum of a bucket goes between hosts."""

    format: str  # A key of FORMATS.
    name: str = ""  # What the error feedback of the bucket is kept by; "": there is none.
    request: Hashable = None  # Something that all ranks have in common. Another one takes new memory.
    labels: tuple[str, ...] = ()  # This rank's names of the tensors. Other tensors begin without an error.


def wire_bytes(count: int) -> int:
    """The bytes of `count` values: the scales of the blocks, the values, and what is missing to a multiple of 4."""
    return -(-count // BLOCK) * SCALE_BYTES + rounded_up(count, SCALE_BYTES)


class Format(ABC):
    """An 8-bit format. Not for several threads at once."""

    largest: np.float32  # The largest number.

    def __init__(self) -> None:
        self._work = np.empty((4, QUANTISED_BATCH_BLOCKS * BLOCK), np.float32)

    def encode(self, values: np.ndarray, errors: np.ndarray | None, wire: np.ndarray) -> None:
        """Write `values` to `wire`.

        Args:
            values: Floating-point numbers, 1-D.
            errors: As many float32: what was rounded off before, which is added to the values, and then what is rounded
                off now. Of blocks that are not finite nothing is kept. None: nothing is kept.
            wire: As many bytes as wire_bytes says.
        """
        scales, codes = _parts(wire, values.size)
        wire[codes.size + scales.nbytes:] = 0
        with np.errstate(all="ignore"):
            for elements, blocks, shape in _batches(values.size):
                wanted, work, *spare = self._work[:, :elements.stop - elements.start].reshape(4, *shape)
                if errors is not None:
                    wanted = errors[elements].reshape(shape)
                    np.add(wanted, values[elements].reshape(shape), out=wanted, casting="same_kind")
                else:
                    np.copyto(wanted, values[elements].reshape(shape), casting="same_kind")
                np.absolute(wanted, out=work)
                most, scale = np.maximum.reduce(work, axis=1), scales[blocks]
                np.maximum(most, LEAST, out=most)
                np.divide(most, self.largest, out=scale)
                self._round(wanted, (self.largest / most)[:, None], work, spare, codes[elements].reshape(shape))
                if errors is not None:
                    np.multiply(work, scale[:, None], out=work)
                    np.subtract(wanted, work, out=wanted)
                    is_lost = ~(most < MOST)
                    if is_lost.any():
                        wanted[is_lost] = 0.0

    def decode(self, wire: np.ndarray, target: np.ndarray, adds: bool = False) -> None:
        """Set the float32 `target` to what `wire` has, or add that to it."""
        scales, codes = _parts(wire, target.size)
        with np.errstate(all="ignore"):
            for elements, blocks, shape in _batches(target.size):
                into = target[elements].reshape(shape)
                work = self._work[0, :into.size].reshape(shape) if adds else into
                self._read(codes[elements].reshape(shape), work)
                np.multiply(work, scales[blocks, None], out=work)
                if adds:
                    np.add(into, work, out=into)

    @abstractmethod
    def _round(self, values: np.ndarray, inverse: np.ndarray, rounded: np.ndarray, spare: Sequence[np.ndarray],
               codes: np.ndarray) -> None:
        """Round `values * inverse` to numbers of the format: to `rounded`, which has |values|, and as bytes to `codes`.

        `spare` has two more arrays of this size.
        """

    @abstractmethod
    def _read(self, codes: np.ndarray, numbers: np.ndarray) -> None:
        """The numbers that the bytes stand for."""


class Int8(Format):
    """Whole numbers from -127 to 127."""

    largest = np.float32(127.0)

    def _round(self, values: np.ndarray, inverse: np.ndarray, rounded: np.ndarray, spare: Sequence[np.ndarray],
               codes: np.ndarray) -> None:
        np.multiply(values, inverse, out=rounded)
        np.rint(rounded, out=rounded)
        np.copyto(codes.view(np.int8), rounded, casting="unsafe")

    def _read(self, codes: np.ndarray, numbers: np.ndarray) -> None:
        np.copyto(numbers, codes.view(np.int8))


class Float8(Format):
    """E4M3 of the OCP's 8-bit floating point specification (arXiv 2209.05433): 3 bits of mantissa, up to 448."""

    largest = np.float32(448.0)
    # The sum of a float and 1.5 * 2**23 quanta has the float as a number of quanta in its last bits. A quantum is an
    # eighth of the float's power of two, and at least that of the subnormal numbers.
    _QUANTA, _LEAST_POWER = np.float32(1.5 * 2**20), np.float32(2.0**-6)
    _LEAST_BITS = (_LEAST_POWER * _QUANTA).view(np.int32)
    _EXPONENT, _EXPONENT_STEP = np.int32(0x7F800000), np.int32(20)  # of a float32; from its exponent to that of E4M3
    _SIGN, _SIGN_STEP = np.int32(-2**31), np.int32(24)  # likewise

    def __init__(self) -> None:
        super().__init__()
        codes = np.arange(256)
        exponent, mantissa = codes >> 3 & 15, codes & 7
        numbers = np.where(exponent > 0, (8 + mantissa) * 2.0**(exponent - 10.0), mantissa * 2.0**-9)
        numbers[codes & 127 == 127] = np.nan
        self._numbers = np.where(codes < 128, numbers, -numbers).astype(np.float32)

    def _round(self, values: np.ndarray, inverse: np.ndarray, rounded: np.ndarray, spare: Sequence[np.ndarray],
               codes: np.ndarray) -> None:
        np.multiply(rounded, inverse, out=rounded)
        power, bits = spare[0], rounded.view(np.int32)
        power_bits, quanta = power.view(np.int32), spare[1].view(np.int32)
        np.bitwise_and(bits, self._EXPONENT, out=power_bits)
        np.maximum(power, self._LEAST_POWER, out=power)
        np.multiply(power, self._QUANTA, out=power)
        np.add(rounded, power, out=rounded)
        np.subtract(bits, power_bits, out=quanta)
        np.subtract(rounded, power, out=rounded)
        np.subtract(power_bits, self._LEAST_BITS, out=power_bits)
        np.right_shift(power_bits, self._EXPONENT_STEP, out=power_bits)
        np.add(quanta, power_bits, out=quanta)
        np.bitwise_and(values.view(np.int32), self._SIGN, out=power_bits)
        np.right_shift(power_bits, self._SIGN_STEP, out=power_bits)
        np.add(quanta, power_bits, out=quanta)
        np.copyto(codes, quanta, casting="unsafe")
        np.copysign(rounded, values, out=rounded)

    def _read(self, codes: np.ndarray, numbers: np.ndarray) -> None:
        np.take(self._numbers, codes, out=numbers, mode="clip")  # Other modes copy `numbers`; no index is too large.


FORMATS: dict[str, type[Int8] | type[Float8]] = {"int8": Int8, "fp8": Float8}


def formats() -> dict[str, Format]:
    """The formats by name, for one thread. Memory that is not used is not taken."""
    return {name: make() for name, make in FORMATS.items()}


def _parts(wire: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The scales and the values of `count` values."""
    scales_end = -(-count // BLOCK) * SCALE_BYTES
    return wire[:scales_end].view(np.float32), wire[scales_end:scales_end + count]


def _batches(count: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """(values, blocks, (number of blocks, their length)) of batches that stay in the cache."""
    whole = count // BLOCK
    for first in range(0, whole, QUANTISED_BATCH_BLOCKS):
        last = min(first + QUANTISED_BATCH_BLOCKS, whole)
        yield slice(first * BLOCK, last * BLOCK), slice(first, last), (last - first, BLOCK)
    if count % BLOCK:
        yield slice(whole * BLOCK, count), slice(whole, whole + 1), (1, count % BLOCK)
