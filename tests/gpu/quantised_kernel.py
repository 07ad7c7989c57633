"""The kernel for blocks of 8-bit numbers, on a GPU or compiled for this machine, against core/quantised.py."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpistrat.core.quantised import BLOCK, SCALE_BYTES
from mpistrat.gpu.backend import await_on_host
from mpistrat.gpu.copy.quantise import BLOCK_BYTES, QuantisedSum
from tests.gpu.memory import LIMIT_S, download, upload
from tests.support import copy_model

BLOCKS = 7


class Case(NamedTuple):
    """What a launch reads."""

    floats: np.ndarray  # (rows, values)
    filled: int  # Values of a row that count.
    wires: np.ndarray  # (rows, blocks, bytes)
    errors: np.ndarray | None


def cases() -> Iterator[Case]:
    """Rows of floats, of whole blocks and not, of 8-bit numbers, and of both, with errors and without."""
    errors = np.random.default_rng(1).standard_normal(BLOCKS * BLOCK).astype(np.float32)
    for rows, missing, has_wires in ((1, 0, False), (1, 5, False), (3, 0, False), (3, BLOCK + 1, False),
                                     (2, 4 * BLOCK, False), (0, 0, True), (1, 0, True)):
        for kept in (None, errors):
            yield Case(hard_values(rows), BLOCKS * BLOCK - missing, hard_wires(3 if has_wires else 0), kept)


def hard_values(rows: int) -> np.ndarray:
    """Floats of all magnitudes, equal to each other, zeros, too small, too large, not finite."""
    random = np.random.default_rng(rows)
    values = random.standard_normal((rows, BLOCKS, BLOCK)) * 10.0 ** random.integers(-6, 6, (BLOCKS, 1))
    if rows:
        values[:, 0] = np.linspace(-127, 127, BLOCK).round(1)  # many are halfway between two numbers
        values[:, 1, ::2] = -0.0
        values[:, 2] *= 1e-40
        values[:, 3] = np.where(np.arange(BLOCK) % 2, 3.3e38, -1e33) / rows
        values[-1, 4, 17], values[-1, 5, 3] = np.nan, -np.inf
    return np.ascontiguousarray(values.reshape(rows, BLOCKS * BLOCK).astype(np.float32))


def hard_wires(rows: int) -> np.ndarray:
    """Blocks with every 8-bit number, and scales of all magnitudes."""
    random = np.random.default_rng(3)
    wires = random.integers(0, 256, (rows, BLOCKS, BLOCK_BYTES), np.uint8)
    if rows:
        wires[0, 0, SCALE_BYTES:] = np.arange(256)
        scales = (10.0 ** random.integers(-8, 8, (rows, BLOCKS))).astype(np.float32)
        scales[-1, 3:6] = np.nan, np.inf, 3e36
        wires[:, :, :SCALE_BYTES] = scales.view(np.uint8).reshape(rows, BLOCKS, SCALE_BYTES)
    return wires


class Memory(Protocol):
    """Where a kernel runs."""

    def upload(self, values: np.ndarray) -> Any: ...

    def address(self, array: Any) -> int: ...

    def download(self, array: Any) -> np.ndarray: ...

    def launch(self, job: QuantisedSum) -> None: ...


class HostMemory:
    """The host's memory. `launch`: Runs the kernel, or its model."""

    def __init__(self, launch: Callable[[QuantisedSum], None]):
        self.launch = launch

    def upload(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def address(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)

    def download(self, array: np.ndarray) -> np.ndarray:
        return array


class GpuMemory:
    """A GPU's memory, or that of the stand-in."""

    def __init__(self, device: Any):
        self._device = device

    def upload(self, values: np.ndarray) -> Any:
        return upload(self._device, values)

    def address(self, array: Any) -> int:
        return int(array.address)

    def download(self, array: Any) -> np.ndarray:
        return download(self._device, array)

    def launch(self, job: QuantisedSum) -> None:
        stream = self._device.stream()
        self._device.quantised_sum(job, stream)
        await_on_host(self._device.record(stream), LIMIT_S)


def results(memory: Memory, format_: str, case: Case) -> list[np.ndarray]:
    """What a launch leaves: the sum, the scales, the numbers, and the errors."""
    floats, wires = memory.upload(case.floats), memory.upload(case.wires)
    total = memory.upload(np.full(BLOCKS * BLOCK, 7, np.float32))
    wire = memory.upload(np.full((BLOCKS, BLOCK_BYTES), 7, np.uint8))
    errors = memory.upload(np.zeros(BLOCKS * BLOCK, np.float32) if case.errors is None else case.errors)
    memory.launch(QuantisedSum(
        format_, BLOCKS, memory.address(floats), len(case.floats), case.floats.strides[0], case.filled,
        memory.address(wires), len(case.wires), case.wires.strides[0], memory.address(total), memory.address(wire),
        0 if case.errors is None else memory.address(errors)))
    written = memory.download(wire)
    return [memory.download(total), written[:, :SCALE_BYTES].copy().view(np.float32)[:, 0], written[:, SCALE_BYTES:],
            memory.download(errors)]


def check(memory: Memory, format_: str, case: Case) -> None:
    """Raise AssertionError if the kernel in `memory` leaves other bits than the path for CPU tensors does."""
    by_path = results(HostMemory(copy_model.quantised_sum), format_, case)
    is_finite = np.isfinite(by_path[1])  # Nobody reads the numbers of the other blocks.
    for ours, theirs in zip(results(memory, format_, case), by_path, strict=True):
        if theirs.dtype == np.uint8:
            np.testing.assert_array_equal(ours[is_finite], theirs[is_finite])
        else:
            np.testing.assert_array_equal(ours, theirs)
            is_number = ~np.isnan(theirs)
            assert ours[is_number].tobytes() == theirs[is_number].tobytes(), "a zero has another sign"
