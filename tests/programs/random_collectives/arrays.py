"""Random collectives on arrays, against numpy: the piece of a program that has nothing to do with its tensor.

Such a piece has *free* calls, which are asynchronous and in another order on each rank, among blocking ones, which have
one order on all ranks, and then waits for them. A loop or the next step makes them again, under the same names, so that
most of it is not negotiated again, with other values and other numbers of gathered rows in each step. Calls are for all
ranks or for a process set. In some a rank disagrees with the others.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mpistrat
from tests.support.adasum import adasum_of
from tests.support.dtypes import dtype_of

HALVES = ("float16", "bfloat16")
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = (*HALVES, "float32", "float64", "float32", "float32", *WHOLE, "bool", "complex64", "complex128")
OF_SCATTERS = (*HALVES, "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((), (0,), (1,), (3, 0, 2), (2, 3), (7,), (64,), (5, 13))

REDUCTIONS = ("allreduce", "grouped_allreduce")
GATHERS = ("allgather",)
SCATTERS = ("reducescatter", "grouped_reducescatter")
EXCHANGES = ("alltoall", "alltoall_splits")
KINDS = (*REDUCTIONS * 2, "allreduce", *GATHERS, *SCATTERS, "broadcast", "broadcast", *EXCHANGES, "adasum")
NOT_WITH_JOIN = (*SCATTERS, *EXCHANGES, "adasum")
OPS = (mpistrat.Average, mpistrat.Sum, mpistrat.Min, mpistrat.Max, mpistrat.Product)


@dataclass(frozen=True)
class Call:
    """One collective, of the kinds above, or "objects" or "barrier"."""

    number: int  # The same on all ranks, and in all steps.
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()  # dtype and shape, without the rows of what is gathered
    op: Any = None
    prescale: float = 1.0
    postscale: float = 1.0
    place: int = 0  # of the process set in the list of sets
    members: tuple[int, ...] = ()
    root: int = 0
    is_whole: bool = True  # Values are small whole numbers, so that the order of a sum does not matter.
    disagrees: bool = False  # The last member passes another shape.

    @property
    def name(self) -> str:
        return f"call/{self.number}"


class Calls:
    """The calls of a piece on one rank.

    `sets`: The ranks of each process set, of which the first are all.
    `steps`: How many steps each rank makes. It then joins, if the numbers differ.
    `has_anonymous`: Some calls have one name for all threads.
    """

    def __init__(self, number: int, sets: Sequence[tuple[int, ...]], steps: Sequence[int], has_anonymous: bool):
        self._sets, self._steps, self._rank, self._number = sets, steps, mpistrat.rank(), 100 * number
        self._joins, self._choose = len(set(steps)) > 1, random.Random(f"{number}/{sets}")
        choose = self._choose
        self._free = [self._call(is_free=True) for _ in range(choose.randint(0, 6))]
        self._blocking = [self._call(is_free=False) for _ in range(choose.randint(0, 4))]
        if has_anonymous and choose.random() < 0.3:
            self._blocking.append(Call(self._next(), choose.choice(["barrier", "objects"]), members=sets[0]))
        # Over hosts of several ranks, sums are sums of the hosts' sums.
        self._sums_in_rank_order = len(mpistrat.hosts()) == 1 or len(sets[0]) <= 3

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _call(self, is_free: bool) -> Call:
        choose = self._choose
        kind = choose.choice([kind for kind in KINDS if not (
            (self._joins and kind in NOT_WITH_JOIN) or (is_free and kind == "grouped_reducescatter"))])
        place = 0 if self._joins or choose.random() < 0.5 else choose.randrange(len(self._sets))
        reduces, members = kind in REDUCTIONS + SCATTERS, self._sets[place]
        op = choose.choice(OPS if kind in REDUCTIONS else OPS[:2])
        dtypes = ("float32", "float64") if kind == "adasum" else OF_SCATTERS if kind in SCATTERS else DTYPES
        counts = [1, 2, 4] if self._joins or kind != "grouped_allreduce" else [0, 1, 2, 5, 30]
        count, arrays = choose.choice(counts) if kind.startswith("grouped") else 1, []
        dtype = choose.choice(dtypes)
        for _ in range(count):
            dtype = choose.choice([dtype, dtype, choose.choice(dtypes)])
            shape = self._shape()[:1 if count == 30 else None]
            if kind in SCATTERS and not shape:
                shape = (choose.randint(0, 7),)
            arrays.append((dtype, shape[1:] if kind in GATHERS + EXCHANGES else shape))
        scales = choose.choice([(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (2.0, 4.0)])
        if kind in REDUCTIONS and any(dtype == "bool" or dtype.startswith("complex") for dtype, _ in arrays):
            op = mpistrat.Product  # of what there is the only one that both have
        if not reduces or any(dtype == "bool" for dtype, _ in arrays) or (self._joins and op not in OPS[:2]):
            scales = (1.0, 1.0)
        return Call(
            self._next(), kind, tuple(arrays), op, *scales, place, members,
            root=choose.choice([rank for rank in members if self._steps[rank] == max(self._steps)]),
            is_whole=kind == "adasum" or choose.random() < 0.5,
            disagrees=(not self._joins and len(members) > 1 and choose.random() < 0.05
                       and kind in ("allreduce", "broadcast")))

    def _shape(self) -> tuple[int, ...]:
        choose, drawn = self._choose, self._choose.random()
        if drawn < 0.55:
            return choose.choice(SHAPES)
        if drawn < 0.97:
            return (choose.randint(1, 30_000),)
        return (choose.randint(1, 4), choose.randint(50_000, 250_000))

    # -- what a step does --

    def run(self, step: int, process_sets: Sequence[Any], own: random.Random) -> None:
        """Make the calls, in an order of this rank's own. Raises AssertionError where a result is wrong."""
        blocking, free = ([call for call in calls if self._rank in call.members]
                          for calls in (self._blocking, self._free))
        own.shuffle(free)
        pending = []
        while blocking or free:
            takes_blocking = not free or (bool(blocking) and own.random() < 0.4)
            call = (blocking if takes_blocking else free).pop(0)
            arrays = values_of(call, step, self._rank)
            if call.disagrees and self._rank == call.members[-1]:
                arrays = [np.zeros((*array.shape, 2), array.dtype) for array in arrays]
            if call.kind == "barrier":
                mpistrat.barrier()
            elif call.kind == "objects":
                ranks = [rank for rank in call.members if self._steps[rank] > step]
                assert mpistrat.allgather_object((self._rank, step)) == [(rank, step) for rank in ranks], call
            elif takes_blocking:
                self._check(call, step, lambda c=call, a=arrays: self._made(c, a, step, process_sets))
            else:
                pending.append((call, self._made(call, arrays, step, process_sets, "_async"), arrays))
            if own.random() < 0.1:
                sum(range(own.randint(0, 100_000)))  # holds Python's lock
        own.shuffle(pending)
        for call, handle, _ in pending:
            self._check(call, step, lambda handle=handle: handle.wait(120))

    def _made(self, call: Call, arrays: Sequence[Any], step: int, process_sets: Sequence[Any], suffix: str = "") -> Any:
        """Make the call; with the suffix "_async" it is a handle."""
        options: dict[str, Any] = {"name": call.name, "process_set": process_sets[call.place]}
        kind = {"adasum": "allreduce", "alltoall_splits": "alltoall"}.get(call.kind, call.kind)
        if call.kind in REDUCTIONS + SCATTERS:
            options |= {"op": call.op, "prescale_factor": call.prescale, "postscale_factor": call.postscale}
        elif call.kind == "adasum":
            options |= {"op": mpistrat.Adasum}
        elif call.kind == "broadcast":
            options |= {"root_rank": call.root}
        elif call.kind == "alltoall_splits":
            options |= {"splits": splits_of(call, step, self._rank)}
        return getattr(mpistrat, kind + suffix)(arrays if kind.startswith("grouped") else arrays[0], **options)

    def _check(self, call: Call, step: int, get: Callable[[], Any]) -> None:
        if call.disagrees:
            with pytest.raises(mpistrat.MismatchError, match=f"{call.name}: the ranks disagree on shape"):
                get()
            return
        results, what = get(), f"step {step} of {call}"
        found = results if call.kind.startswith("grouped") or call.kind == "alltoall_splits" else [results]
        assert all(type(result) is np.ndarray for result in found), what
        for result, (array, magnitudes) in zip(found, self._expected(call, step), strict=True):
            assert_right(result, array, magnitudes, what)

    def _expected(self, call: Call, step: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Each result, and how large what was summed is, if the result is not known to the last bit."""
        ranks = [rank for rank in call.members if self._steps[rank] > step]
        of_ranks, mine = [values_of(call, step, rank) for rank in ranks], ranks.index(self._rank)
        if call.kind in EXCHANGES:
            yield from ((array, None) for array in exchanged(call, step, mine, of_ranks))
            return
        if call.kind == "broadcast":
            yield from ((array, None) for array in values_of(call, step, call.root))
            return
        for parts in zip(*of_ranks, strict=True):
            if call.kind in GATHERS:
                yield np.concatenate(parts), None
            elif call.kind == "adasum":
                wide = [part.astype(np.float64) for part in parts]
                yield adasum_of(wide).astype(parts[0].dtype), np.asarray(sum(map(np.abs, wide)))
            else:
                whole, sizes = reduced(call, parts), magnitude(call, parts)
                if call.kind in SCATTERS:
                    counts = [len(whole) // len(ranks) + (r < len(whole) % len(ranks)) for r in range(len(ranks))]
                    rows = slice(sum(counts[:mine]), sum(counts[:mine + 1]))
                    whole, sizes = whole[rows], sizes[rows] if sizes.ndim else sizes
                yield whole, None if self._is_exact(call, whole.dtype, len(ranks)) else sizes

    def _is_exact(self, call: Call, dtype: np.dtype, size: int) -> bool:
        """Whether the result of a reduction is known to the last bit, and not only about."""
        if dtype.kind in "iub":
            return True
        # A third is rounded, wherever that is done; products of complex numbers are summed by numpy in its own way.
        if (call.op == mpistrat.Average and size & (size - 1)) or dtype.kind == "c":
            return False
        # Each host rounds its sum before it sends it to the others.
        is_rounded_twice = dtype.name in HALVES and len(mpistrat.hosts()) > 1
        return call.is_whole or (self._sums_in_rank_order and not is_rounded_twice)


# -- the values, and what numpy makes of them ------------------------------------------------------------------------


def splits_of(call: Call, step: int, rank: int) -> np.ndarray:
    generator = np.random.default_rng([step, call.number, rank])
    if call.kind == "alltoall":
        return np.full(len(call.members), generator.integers(0, 3), np.int32)
    return generator.integers(0, 4, len(call.members)).astype(np.int32)


def values_of(call: Call, step: int, rank: int) -> list[np.ndarray]:
    arrays = []
    for place, (name, shape) in enumerate(call.arrays):
        generator = np.random.default_rng([step, call.number, place, rank])
        if call.kind in GATHERS:
            shape = (int(generator.integers(0, 5)), *shape)
        elif call.kind in EXCHANGES:
            shape = (int(splits_of(call, step, rank).sum()), *shape)
        if name == "bool":
            arrays.append(np.asarray(generator.integers(0, 2, shape)).astype(bool))
        elif call.is_whole or name in WHOLE:
            low = 0 if name.startswith("uint") else -3
            arrays.append(np.asarray(generator.integers(low, 4, shape)).astype(dtype_of(name)))
        else:
            array = generator.normal(size=shape)
            if name.startswith("complex"):
                array = array + 1j * generator.normal(size=shape)
            arrays.append(np.asarray(array).astype(dtype_of(name)))
    return arrays


def reduced(call: Call, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The reduction in the order of the ranks: half precision in float32, averages of integers truncated."""
    dtype, size = parts[0].dtype, len(parts)
    is_half = dtype.name in HALVES
    parts = [np.asarray(part.astype(np.float32) if is_half else part) for part in parts]
    if call.prescale != 1.0:
        parts = [np.asarray(part * part.dtype.type(call.prescale)) for part in parts]
    ufunc = {mpistrat.Min: np.minimum, mpistrat.Max: np.maximum, mpistrat.Product: np.multiply}.get(call.op, np.add)
    total = parts[0]
    for part in parts[1:]:
        total = np.asarray(ufunc(total, part))
    divisor = size if call.op == mpistrat.Average else 1
    if dtype.kind in "iu":
        # Whole numbers are small, and so exact.
        return np.trunc(total.astype(np.float64) * call.postscale / divisor).astype(dtype)
    if dtype.kind != "b":
        total = np.asarray(total * total.dtype.type(call.postscale / divisor))
    return total.astype(dtype)


def magnitude(call: Call, parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sum of the absolute values of what is summed. Rounding errors of partial sums are relative to it.

    The total may be much smaller. For other operations it is a constant, since values are about one.
    """
    if call.op not in (mpistrat.Sum, mpistrat.Average):
        return np.asarray(8.0)
    wide = np.complex128 if parts[0].dtype.kind == "c" else np.float64
    factor = call.prescale * call.postscale / (len(parts) if call.op == mpistrat.Average else 1)
    return np.asarray(factor * sum(np.abs(part.astype(wide)) for part in parts))


def assert_right(result: Any, expected: np.ndarray, magnitudes: np.ndarray | None, what: str) -> None:
    """Compare a result with numpy's: bit by bit without `magnitudes`, else as exactly as they and the dtype allow."""
    assert result.dtype == expected.dtype and result.shape == expected.shape, \
        f"{what}: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    if magnitudes is None:
        np.testing.assert_array_equal(np.ascontiguousarray(result).reshape(-1).view(np.uint8),
                                      np.ascontiguousarray(expected).reshape(-1).view(np.uint8), err_msg=what)
        return
    wide = np.complex128 if result.dtype.kind == "c" else np.float64
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-12, "complex128": 1e-12}.get(result.dtype.name, 2e-5)
    right, size = expected.astype(wide), np.abs(expected.astype(wide))
    # 1e-3: the smallest numbers of half precision are not exact.
    limit = tolerance * (magnitudes + size + 1e-3)
    is_close = (result == expected) | (np.isfinite(size) & (np.abs(result.astype(wide) - right) <= limit))
    wrong = np.flatnonzero(~is_close)
    assert not len(wrong), (f"{what}: {len(wrong)} of {result.size} elements are wrong. The first, at {wrong[0]}, is "
                            f"{result.flat[wrong[0]]}, not {expected.flat[wrong[0]]}.")


def exchanged(call: Call, step: int, mine: int, of_ranks: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """What an all-to-all gives to the member `mine`."""
    pieces, received = [], []
    for rank, (array,) in zip(call.members, of_ranks, strict=True):
        splits = splits_of(call, step, rank)
        start = int(splits[:mine].sum())
        pieces.append(array[start:start + splits[mine]])
        received.append(splits[mine])
    whole = np.concatenate(pieces)
    return [whole] if call.kind == "alltoall" else [whole, np.array(received, np.int32)]
