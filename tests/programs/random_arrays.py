"""Random programs of all collectives on arrays, in several threads, against numpy.

A program is the same on all ranks but for the order of what may be in any order. Each thread makes such *free* calls,
which are asynchronous, among blocking ones, which have one order on all ranks, and then waits for them. It does so
several times, under the same names, so that most of it is not negotiated again, with other values and other numbers of
gathered rows. Calls are for all ranks or for a process set; the sets overlap. In some programs each rank makes another
number of steps and then joins, and in some a rank disagrees with the others.

usage: random_arrays.py PROGRAMS [FIRST] [background] [hosts]

FIRST is the number of the first program. With "background" TensorFlow computes meanwhile; with "hosts" two consecutive
ranks are a host each. A program that is wrong is reported with its number, and a rank that does not come is an error
after a minute.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpistrat
from tests.support.adasum import adasum_of
from tests.support.dtypes import dtype_of
from tests.support.pretended_hosts import pretend_hosts

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
    """One collective of a program, of the kinds above, or "objects" or "barrier"."""

    number: int
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


@dataclass(frozen=True)
class Phase:
    """What a thread does before it waits for all of it."""

    free: tuple[Call, ...]
    blocking: tuple[Call, ...]


@dataclass(frozen=True)
class Program:
    """The phases of each thread, which each rank runs `steps[rank]` times; then it joins, if the numbers differ."""

    seed: int
    threads: tuple[tuple[Phase, ...], ...]
    steps: tuple[int, ...]

    @property
    def joins(self) -> bool:
        return len(set(self.steps)) > 1


# -- the program ------------------------------------------------------------------------------------------------------


class Draw:
    """Draws a program.

    Args:
        sets: The ranks of each process set, of which the first are all.
    """

    def __init__(self, seed: int, sets: Sequence[tuple[int, ...]]):
        self._sets, self._choose = sets, random.Random(f"{seed}/{sets}")
        size, choose = len(sets[0]), self._choose
        self._joins = choose.random() < 0.2
        self._steps = tuple(choose.randint(0, 3) for _ in range(size)) if self._joins else \
            (choose.choice([1, 3, 6]),) * size
        self._number = 0
        threads = choose.choice([1, 1, 2, 3]) if not self._joins else 1
        self.program = Program(seed, tuple(self._phases(thread) for thread in range(threads)), self._steps)

    def _phases(self, thread: int) -> tuple[Phase, ...]:
        choose = self._choose
        phases = []
        for _ in range(choose.randint(1, 2)):
            free = [self._call(is_free=True) for _ in range(choose.randint(0, 6))]
            blocking = [self._call(is_free=False) for _ in range(choose.randint(0, 4))]
            if thread == 0 and choose.random() < 0.3:  # These have one name for all threads.
                blocking.append(Call(self._next(), choose.choice(["barrier", "objects"]), members=self._sets[0]))
            phases.append(Phase(tuple(free), tuple(blocking)))
        return tuple(phases)

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
        dtypes = ("float32", "float64") if kind == "adasum" else \
            OF_SCATTERS if kind in SCATTERS else DTYPES
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


# -- its values, and what numpy makes of them -------------------------------------------------------------------------


def splits_of(call: Call, seed: int, step: int, rank: int) -> np.ndarray:
    """How many rows a rank sends to each member."""
    generator = np.random.default_rng([seed, step, call.number, rank])
    if call.kind == "alltoall":
        return np.full(len(call.members), generator.integers(0, 3), np.int32)
    return generator.integers(0, 4, len(call.members)).astype(np.int32)


def values_of(call: Call, seed: int, step: int, rank: int) -> list[np.ndarray]:
    """What a rank brings."""
    arrays = []
    for place, (name, shape) in enumerate(call.arrays):
        generator = np.random.default_rng([seed, step, call.number, place, rank])
        if call.kind in GATHERS:
            shape = (int(generator.integers(0, 5)), *shape)
        elif call.kind in EXCHANGES:
            shape = (int(splits_of(call, seed, step, rank).sum()), *shape)
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


def exchanged(call: Call, seed: int, step: int, mine: int, of_ranks: Sequence[Sequence[np.ndarray]]
              ) -> list[np.ndarray]:
    """What an all-to-all gives to the member `mine`."""
    pieces, received = [], []
    for rank, (array,) in zip(call.members, of_ranks, strict=True):
        splits = splits_of(call, seed, step, rank)
        start = int(splits[:mine].sum())
        pieces.append(array[start:start + splits[mine]])
        received.append(splits[mine])
    whole = np.concatenate(pieces)
    return [whole] if call.kind == "alltoall" else [whole, np.array(received, np.int32)]


# -- the calls --------------------------------------------------------------------------------------------------------


def call_of(call: Call, arrays: Sequence[Any], splits: Any, process_set: Any, suffix: str = "") -> Any:
    """Make the call; with the suffix "_async" it is a handle."""
    options: dict[str, Any] = {"name": call.name, "process_set": process_set}
    kind = {"adasum": "allreduce", "alltoall_splits": "alltoall"}.get(call.kind, call.kind)
    if call.kind in REDUCTIONS + SCATTERS:
        options |= {"op": call.op, "prescale_factor": call.prescale, "postscale_factor": call.postscale}
    elif call.kind == "adasum":
        options |= {"op": mpistrat.Adasum}
    elif call.kind == "broadcast":
        options |= {"root_rank": call.root}
    elif call.kind == "alltoall_splits":
        options |= {"splits": splits}
    return getattr(mpistrat, kind + suffix)(arrays if kind.startswith("grouped") else arrays[0], **options)


class Rank:
    """Runs programs on one rank."""

    def __init__(self, sets: Sequence[Any], sums_in_rank_order: bool):
        self.rank, self.size = mpistrat.rank(), mpistrat.size()
        self._sets, self._in_order = sets, sums_in_rank_order

    def run(self, program: Program) -> int:
        """Run it, and return how many calls there were. Raises AssertionError where a result is wrong."""
        with ThreadPoolExecutor(len(program.threads)) as pool:
            for future in [pool.submit(self._run_thread, program, i) for i in range(len(program.threads))]:
                future.result()
        if program.joins:
            last = mpistrat.join()
            assert len(set(mpistrat.allgather_object(last))) == 1, program
        return sum(len(p.free) + len(p.blocking) for t in program.threads for p in t) * program.steps[self.rank]

    def _run_thread(self, program: Program, thread: int) -> None:
        own = random.Random(f"{program.seed}/{self.rank}/{thread}")  # other orders on each rank
        kept: list[tuple[Call, int, Any]] = []
        for step in range(program.steps[self.rank]):
            for phase in program.threads[thread]:
                kept += self._run_phase(program, phase, step, own)
                kept = kept[-5:]
        for call, step, results in kept:
            self._check(program, call, step, results)  # Still right, after others have come.

    def _run_phase(self, program: Program, phase: Phase, step: int, own: random.Random) -> list[tuple[Call, int, Any]]:
        blocking, free = ([call for call in calls if self.rank in call.members]
                          for calls in (phase.blocking, phase.free))
        own.shuffle(free)
        pending, done = [], []
        while blocking or free:
            takes_blocking = not free or (bool(blocking) and own.random() < 0.4)
            call = (blocking if takes_blocking else free).pop(0)
            brought = self._brought(program, call, step)
            if takes_blocking:
                self._collect(program, call, step, lambda c=call, b=brought: self._block(program, c, b, step), done)
            else:
                splits, process_set = splits_of(call, program.seed, step, self.rank), self._sets[call.place]
                pending.append((call, call_of(call, brought, splits, process_set, "_async"), brought))
            if own.random() < 0.1:
                sum(range(own.randint(0, 100_000)))  # holds Python's lock
        own.shuffle(pending)
        for call, handle, _ in pending:
            self._collect(program, call, step, lambda handle=handle: handle.wait(120), done)
        return done

    def _brought(self, program: Program, call: Call, step: int) -> list[np.ndarray]:
        arrays = values_of(call, program.seed, step, self.rank)
        if call.disagrees and self.rank == call.members[-1]:
            arrays = [np.zeros((*array.shape, 2), array.dtype) for array in arrays]
        return arrays

    def _block(self, program: Program, call: Call, arrays: Sequence[Any], step: int) -> Any:
        if call.kind == "barrier":
            return mpistrat.barrier()
        if call.kind == "objects":
            return mpistrat.allgather_object((self.rank, step))
        splits, process_set = splits_of(call, program.seed, step, self.rank), self._sets[call.place]
        return call_of(call, arrays, splits, process_set)

    def _collect(self, program: Program, call: Call, step: int, get: Callable[[], Any],
                 done: list[tuple[Call, int, Any]]) -> None:
        if not call.disagrees:
            done.append((call, step, get()))
            self._check(program, *done[-1])
            return
        try:
            get()
        except mpistrat.MismatchError as error:
            assert f"{call.name}: the ranks disagree on shape" in str(error), error
        else:
            raise AssertionError(f"no error: {call} in {program}")

    def _check(self, program: Program, call: Call, step: int, results: Any) -> None:
        what = f"step {step} of {call} in {program}"
        if call.kind == "barrier":
            return
        if call.kind == "objects":
            ranks = [rank for rank in range(self.size) if program.steps[rank] > step]
            assert results == [(rank, step) for rank in ranks], f"{what}: {results}"
            return
        found = results if call.kind.startswith("grouped") or call.kind == "alltoall_splits" else [results]
        assert all(type(result) is np.ndarray for result in found), what
        expected = list(self._expected(program, call, step))
        assert len(found) == len(expected), what
        for result, (array, magnitudes) in zip(found, expected, strict=True):
            assert_right(result, array, magnitudes, what)

    def _expected(self, program: Program, call: Call, step: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Each result, and how large what was summed is, if the result is not known to the last bit."""
        ranks = [rank for rank in call.members if program.steps[rank] > step]
        of_ranks, mine = [values_of(call, program.seed, step, rank) for rank in ranks], ranks.index(self.rank)
        if call.kind in EXCHANGES:
            yield from ((array, None) for array in exchanged(call, program.seed, step, mine, of_ranks))
            return
        if call.kind == "broadcast":
            yield from ((array, None) for array in values_of(call, program.seed, step, call.root))
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
        return call.is_whole or (self._in_order and not is_rounded_twice)


@contextmanager
def tensorflow_in_the_background() -> Iterator[None]:
    """TensorFlow multiplies matrices meanwhile, and calls Python."""
    import tensorflow as tf
    stop = threading.Event()
    failed: list[BaseException] = []

    @tf.function
    def work(x: tf.Tensor) -> tf.Tensor:
        for _ in range(3):
            x = tf.math.tanh(x @ x) + tf.ensure_shape(tf.numpy_function(np.negative, [x], tf.float32), x.shape)
        return x

    def loop() -> None:
        try:
            x = tf.eye(100)
            while not stop.is_set():
                work(x)
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


def main() -> None:
    """Run the programs."""
    options = [word for word in sys.argv[1:] if not word.isdigit()]
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
    count, first = numbers[0], (numbers[1:] or [0])[0]
    os.environ.setdefault("MPISTRAT_STALL_CHECK_TIME_SECONDS", "20")
    os.environ.setdefault("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "60")
    if "hosts" in options:
        pretend_hosts(2)
    mpistrat.init()
    size = mpistrat.size()
    members = list(dict.fromkeys([tuple(range(size)), tuple(range(size - 1)), tuple(range(1, size)), (0, size - 1)]))
    sets = [mpistrat.global_process_set, *map(mpistrat.add_process_set, members[1:])]
    # Over hosts of several ranks, sums are sums of the hosts' sums.
    own = Rank(sets, sums_in_rank_order=len(mpistrat.hosts()) == 1 or size <= 3)
    calls = 0
    with tensorflow_in_the_background() if "background" in options else nullcontext():
        for seed in range(first, first + count):
            program = Draw(seed, members).program
            assert len(set(mpistrat.allgather_object(repr(program)))) == 1, "the ranks have drawn different programs"
            calls += own.run(program)
    print(f"rank {own.rank}: {count} programs of {calls} collectives are right", flush=True)


main()
