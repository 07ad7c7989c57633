"""Blocks of 8-bit numbers with a scale for each block: the data between hosts with `Compression.int8`.

A block has BLOCK consecutive values. Its scale is the largest absolute value, divided by 127. The values are divided by
the scale and rounded to whole numbers, ties to even. The rounding errors are added to the next values of the same
tensor (error feedback: Seide et al., 1-bit SGD, 2014; Karimireddy et al., arXiv 1901.09847). Nothing is random, so
equal values give equal bytes.

If a block contains a NaN or an infinity, its scale is not finite. The receiver then reads no finite value in the block.
Only the engine's thread uses this module.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import numpy as np

from .memory import rounded_up
from .tuning import QUANTISED_BATCH_BLOCKS

INT8 = "int8"  # The wire_dtype of requests whose sums are sent between hosts as such blocks.
BLOCK = 256
SCALE_BYTES = 4
# A block whose largest value is smaller gets this one instead, so that the scale and its inverse are normal floats.
_LEAST = np.float32(1e-35)
_MOST = np.float32(3e38)  # For larger values the product with the scale may overflow.
_LARGEST = np.float32(127.0)


@dataclass(frozen=True, slots=True)
class Quantised:
    """How the sum of a bucket is sent between hosts."""

    name: str = ""  # The key of the bucket's error feedback; "": there is no error feedback.
    request: Hashable = None  # An object that is equal on all ranks. If it changes, the error feedback starts anew.
    labels: tuple[str, ...] = ()  # This rank's names of the tensors. If they change, the errors are reset to zero.


def wire_bytes(count: int) -> int:
    """Return how many bytes `count` values need: the scales, a byte for each value, padding to a multiple of 4."""
    return -(-count // BLOCK) * SCALE_BYTES + rounded_up(count, SCALE_BYTES)


class Codec:
    """Rounds values to blocks, and reads blocks. Only one thread at a time may use a codec."""

    def __init__(self) -> None:
        self._work = np.empty((2, QUANTISED_BATCH_BLOCKS * BLOCK), np.float32)

    def encode(self, values: np.ndarray, errors: np.ndarray | None, wire: np.ndarray) -> None:
        """Write the 1-D floating-point `values` to `wire`, which has wire_bytes(values.size) bytes.

        `errors`: The rounding errors of the previous call, one float32 for each value; None: not kept. They are added
        to the values, and then replaced by the errors of this call (zeros in blocks that are not finite).
        """
        scales, codes = _parts(wire, values.size)
        wire[codes.size + scales.nbytes:] = 0
        with np.errstate(all="ignore"):
            for elements, blocks, shape in _batches(values.size):
                wanted, work = self._work[:, :elements.stop - elements.start].reshape(2, *shape)
                if errors is not None:
                    wanted = errors[elements].reshape(shape)
                    np.add(wanted, values[elements].reshape(shape), out=wanted, casting="same_kind")
                else:
                    np.copyto(wanted, values[elements].reshape(shape), casting="same_kind")
                np.absolute(wanted, out=work)
                most, scale = np.maximum.reduce(work, axis=1), scales[blocks]
                np.maximum(most, _LEAST, out=most)
                np.divide(most, _LARGEST, out=scale)
                np.multiply(wanted, (_LARGEST / most)[:, None], out=work)
                np.rint(work, out=work)
                np.copyto(codes[elements].reshape(shape), work, casting="unsafe")
                if errors is not None:
                    np.multiply(work, scale[:, None], out=work)
                    np.subtract(wanted, work, out=wanted)
                    is_lost = ~(most < _MOST)
                    if is_lost.any():
                        wanted[is_lost] = 0.0

    def decode(self, wire: np.ndarray, target: np.ndarray, adds: bool = False) -> None:
        """Write the values in `wire` to the float32 `target`. If `adds` is true, add them to `target` instead."""
        scales, codes = _parts(wire, target.size)
        with np.errstate(all="ignore"):
            for elements, blocks, shape in _batches(target.size):
                into = target[elements].reshape(shape)
                work = self._work[0, :into.size].reshape(shape) if adds else into
                np.copyto(work, codes[elements].reshape(shape))
                np.multiply(work, scales[blocks, None], out=work)
                if adds:
                    np.add(into, work, out=into)


def _parts(wire: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return views of `wire`: the scales, and the 8-bit numbers of `count` values."""
    scales_end = -(-count // BLOCK) * SCALE_BYTES
    return wire[:scales_end].view(np.float32), wire[scales_end:scales_end + count].view(np.int8)


def _batches(count: int) -> Iterator[tuple[slice, slice, tuple[int, int]]]:
    """Yield (slice of values, slice of blocks, (number of blocks, block length)) of batches that fit in the cache."""
    whole = count // BLOCK
    for first in range(0, whole, QUANTISED_BATCH_BLOCKS):
        last = min(first + QUANTISED_BATCH_BLOCKS, whole)
        yield slice(first * BLOCK, last * BLOCK), slice(first, last), (last - first, BLOCK)
    if count % BLOCK:
        yield slice(whole * BLOCK, count), slice(whole, whole + 1), (1, count % BLOCK)
