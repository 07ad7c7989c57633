"""Random programs of collectives on numpy arrays, in several threads and in another order on each rank, against numpy.

A program is the same on all ranks but for the order of what may be in any order: each thread submits asynchronous
collectives among blocking ones, which have one order on all ranks, and then waits for them. It does so several times,
under the same names, so that most of it is not negotiated again, with other values and other numbers of gathered rows.

usage: random_arrays.py PROGRAMS [FIRST] [tensorflow] [hosts]

FIRST is the number of the first program. With "tensorflow", TensorFlow computes in the background; with "hosts", two
consecutive ranks are a host each. A program that is wrong is reported with its number, and a rank that does not come is
an error after a minute.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import mpistrat
from tests.support.dtypes import dtype_of
from tests.support.pretended_hosts import pretend_hosts

HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES = (*FLOATS, "float32", "float32", *WHOLE, "bool", "complex64", "complex128")
SHAPES = ((), (0,), (1,), (3, 0, 2), (2, 3), (7,), (64,), (5, 13))


@dataclass(frozen=True)
class Operation:
    """One collective of a program.

    Attributes:
        kind: allreduce, grouped, allgather, broadcast, objects or barrier.
        arrays: The dtype and shape of each array; of one that is gathered, without the rows.
        is_whole: Values are small whole numbers, so that the order of a sum does not matter.
    """

    number: int
    name: str
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    op: Any = None
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    is_whole: bool = True


@dataclass(frozen=True)
class Phase:
    """What a thread does before it waits for all of it."""

    asynchronous: tuple[Operation, ...]
    blocking: tuple[Operation, ...]


# -- the program ------------------------------------------------------------------------------------------------------


def drawn_shape(chooser: random.Random) -> tuple[int, ...]:
    drawn = chooser.random()
    if drawn < 0.55:
        return chooser.choice(SHAPES)
    if drawn < 0.97:
        return (chooser.randint(1, 30_000),)
    return (chooser.randint(1, 4), chooser.randint(50_000, 250_000))


def drawn_operation(chooser: random.Random, number: int, size: int) -> Operation:
    kind = chooser.choice(["allreduce"] * 5 + ["grouped"] * 3 + ["allgather"] * 2 + ["broadcast"] * 2)
    op = chooser.choice([mpistrat.Average, mpistrat.Sum, mpistrat.Sum, mpistrat.Min, mpistrat.Max, mpistrat.Product])
    count = chooser.choice([0, 1, 2, 5, 30]) if kind == "grouped" else 1
    arrays, dtype = [], chooser.choice(DTYPES)
    for _ in range(count):
        dtype = chooser.choice([dtype, dtype, chooser.choice(DTYPES)])
        shape = drawn_shape(chooser)
        arrays.append((dtype, shape[1:] if kind == "allgather" else shape if count < 30 else shape[:1]))
    if kind in ("allreduce", "grouped") and any(dtype == "bool" or dtype.startswith("complex") for dtype, _ in arrays):
        op = mpistrat.Product  # of what there is the only one that both have
    scales = chooser.choice([(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.5), (2.0, 4.0)])
    if kind not in ("allreduce", "grouped") or any(dtype == "bool" for dtype, _ in arrays):
        scales = (1.0, 1.0)
    return Operation(number, f"operation/{number}", kind, tuple(arrays), op, *scales, root=chooser.randrange(size),
                     is_whole=chooser.random() < 0.5)


def drawn_program(chooser: random.Random, size: int) -> list[list[Phase]]:
    """The phases of each thread."""
    numbers = iter(range(10**6))
    threads: list[list[Phase]] = []
    for thread in range(chooser.choice([1, 1, 2, 3])):
        phases = []
        for _ in range(chooser.randint(1, 2)):
            asynchronous = [drawn_operation(chooser, next(numbers), size) for _ in range(chooser.randint(0, 6))]
            blocking = [drawn_operation(chooser, next(numbers), size) for _ in range(chooser.randint(0, 4))]
            if thread == 0 and chooser.random() < 0.3:  # these have one name for all threads
                blocking.append(Operation(next(numbers), "", chooser.choice(["barrier", "objects"]), ()))
            phases.append(Phase(tuple(asynchronous), tuple(blocking)))
        threads.append(phases)
    return threads


# -- its values, and what numpy makes of them -------------------------------------------------------------------------


def values(operation: Operation, seed: int, step: int, rank: int) -> list[np.ndarray]:
    """What a rank brings."""
    arrays = []
    for place, (name, shape) in enumerate(operation.arrays):
        generator = np.random.default_rng([seed, step, operation.number, place, rank])
        if operation.kind == "allgather":
            shape = (int(generator.integers(0, 5)), *shape)
        if name == "bool":
            arrays.append(generator.integers(0, 2, shape).astype(bool))
        elif operation.is_whole or name in WHOLE:
            low = 0 if name.startswith("uint") else -3
            arrays.append(generator.integers(low, 4, shape).astype(dtype_of(name)))
        else:
            array = generator.normal(size=shape)
            if name.startswith("complex"):
                array = array + 1j * generator.normal(size=shape)
            arrays.append(np.asarray(array).astype(dtype_of(name)))
    return arrays


def reduced(operation: Operation, parts: list[np.ndarray]) -> np.ndarray:
    """The reduction in the order of the ranks: half precision in float32, averages of integers truncated."""
    dtype, size = parts[0].dtype, len(parts)
    is_half = dtype.name in HALVES
    parts = [np.asarray(part.astype(np.float32) if is_half else part) for part in parts]
    if operation.prescale != 1.0:
        parts = [np.asarray(part * part.dtype.type(operation.prescale)) for part in parts]
    ufunc = {mpistrat.Min: np.minimum, mpistrat.Max: np.maximum,
             mpistrat.Product: np.multiply}.get(operation.op, np.add)
    total = parts[0]
    for part in parts[1:]:
        total = np.asarray(ufunc(total, part))
    divisor = size if operation.op == mpistrat.Average else 1
    if dtype.kind in "iu":
        # Whole numbers are small, and so exact.
        return np.trunc(total.astype(np.float64) * operation.postscale / divisor).astype(dtype)
    if dtype.kind != "b":
        total = np.asarray(total * total.dtype.type(operation.postscale / divisor))
    return total.astype(dtype)


def magnitude(operation: Operation, parts: list[np.ndarray]) -> np.ndarray:
    """The sum of the absolute values of what is summed. Rounding errors of partial sums are relative to it.

    The total may be much smaller. For other operations it is a constant, since values are about one.
    """
    if operation.op not in (mpistrat.Sum, mpistrat.Average):
        return np.asarray(8.0)
    wide = np.complex128 if parts[0].dtype.kind == "c" else np.float64
    factor = operation.prescale * operation.postscale / (len(parts) if operation.op == mpistrat.Average else 1)
    return np.asarray(factor * sum(np.abs(part.astype(wide)) for part in parts))


def assert_right(result: np.ndarray, expected: np.ndarray, magnitudes: np.ndarray | None, what: str) -> None:
    """Compare a result with numpy's: bit by bit without `magnitudes`, else as exactly as they and the dtype allow."""
    assert isinstance(result, np.ndarray) and result.dtype == expected.dtype and result.shape == expected.shape, \
        f"{what}: {result.dtype}{result.shape}, not {expected.dtype}{expected.shape}"
    if magnitudes is None:
        np.testing.assert_array_equal(result.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8),
                                      err_msg=what)
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


class Program:
    """A program on one rank."""

    def __init__(self, seed: int, sums_in_rank_order: bool):
        self._seed, self._rank, self._size = seed, mpistrat.rank(), mpistrat.size()
        self._in_order = sums_in_rank_order
        self._threads = drawn_program(random.Random(f"{seed}/{self._size}"), self._size)
        self._steps = random.Random(seed).choice([1, 3, 6])
        self.operations = sum(len(p.asynchronous) + len(p.blocking) for t in self._threads for p in t) * self._steps

    def run(self) -> None:
        """Run it; raise AssertionError where a result is wrong."""
        with ThreadPoolExecutor(len(self._threads)) as pool:
            for future in [pool.submit(self._run_thread, i) for i in range(len(self._threads))]:
                future.result()

    def _run_thread(self, thread: int) -> None:
        own = random.Random(f"{self._seed}/{self._rank}/{thread}")  # other orders on each rank
        kept: list[tuple[Operation, int, Any]] = []
        for step in range(self._steps):
            for phase in self._threads[thread]:
                kept += self._run_phase(phase, step, own)
                kept = kept[-5:]
        for operation, step, results in kept:
            self._check(operation, step, results)  # Still right, after others have come.

    def _run_phase(self, phase: Phase, step: int, own: random.Random) -> list[tuple[Operation, int, Any]]:
        blocking, asynchronous = list(phase.blocking), list(phase.asynchronous)
        own.shuffle(asynchronous)
        pending, done = [], []
        while blocking or asynchronous:
            takes_blocking = not asynchronous or (bool(blocking) and own.random() < 0.4)
            operation = (blocking if takes_blocking else asynchronous).pop(0)
            brought = values(operation, self._seed, step, self._rank)
            if takes_blocking:
                done.append((operation, step, self._call(operation, brought, step)))
                self._check(*done[-1])
            else:
                pending.append((operation, self._begin(operation, brought), brought))
            if own.random() < 0.1:
                sum(range(own.randint(0, 100_000)))  # holds Python's lock
        own.shuffle(pending)
        for operation, handle, _ in pending:
            results = handle.wait(120)
            done.append((operation, step, results if operation.kind == "grouped" else [results]))
            self._check(*done[-1])
        return done

    def _call(self, operation: Operation, arrays: list[np.ndarray], step: int) -> Any:
        name = operation.name
        if operation.kind == "barrier":
            return mpistrat.barrier()
        if operation.kind == "objects":
            return mpistrat.allgather_object((self._rank, step))
        if operation.kind == "allgather":
            return [mpistrat.allgather(arrays[0], name=name)]
        if operation.kind == "broadcast":
            return [mpistrat.broadcast(arrays[0], operation.root, name=name)]
        if operation.kind == "grouped":
            return mpistrat.grouped_allreduce(arrays, **_options(operation))
        return [mpistrat.allreduce(arrays[0], **_options(operation))]

    def _begin(self, operation: Operation, arrays: list[np.ndarray]) -> Any:
        name = operation.name
        if operation.kind == "allgather":
            return mpistrat.allgather_async(arrays[0], name=name)
        if operation.kind == "broadcast":
            return mpistrat.broadcast_async(arrays[0], operation.root, name=name)
        if operation.kind == "grouped":
            return mpistrat.grouped_allreduce_async(arrays, **_options(operation))
        return mpistrat.allreduce_async(arrays[0], **_options(operation))

    def _check(self, operation: Operation, step: int, results: Any) -> None:
        what = f"program {self._seed}, step {step}, {operation}"
        if operation.kind == "barrier":
            return
        if operation.kind == "objects":
            assert results == [(rank, step) for rank in range(self._size)], f"{what}: {results}"
            return
        of_ranks = [values(operation, self._seed, step, rank) for rank in range(self._size)]
        if operation.kind in ("broadcast", "allgather"):
            expected = of_ranks[operation.root] if operation.kind == "broadcast" else \
                [np.concatenate([arrays[0] for arrays in of_ranks])]
            assert len(results) == len(expected), what
            for result, array in zip(results, expected, strict=True):
                assert_right(result, array, None, what)
            return
        assert len(results) == len(of_ranks[0]), what
        for result, parts in zip(results, (list(parts) for parts in zip(*of_ranks, strict=True)), strict=True):
            is_exact = self._is_exact(operation, parts[0].dtype)
            assert_right(result, reduced(operation, parts), None if is_exact else magnitude(operation, parts), what)

    def _is_exact(self, operation: Operation, dtype: np.dtype) -> bool:
        """Whether the result of a reduction is known to the last bit, and not only about."""
        if dtype.kind in "iub":
            return True
        # A third is rounded, wherever that is done; products of complex numbers are summed by numpy in its own way.
        if (operation.op == mpistrat.Average and self._size & (self._size - 1)) or dtype.kind == "c":
            return False
        # Each host rounds its sum before it sends it to the others.
        is_rounded_twice = dtype.name in HALVES and len(mpistrat.hosts()) > 1
        return operation.is_whole or (self._in_order and not is_rounded_twice)


def _options(operation: Operation) -> dict[str, Any]:
    return {"name": operation.name, "op": operation.op, "prescale_factor": operation.prescale,
            "postscale_factor": operation.postscale}


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


@contextmanager
def nothing_in_the_background() -> Iterator[None]:
    """For jobs without."""
    yield


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
    # Over hosts of several ranks, sums are sums of the hosts' sums.
    sums_in_rank_order = len(mpistrat.hosts()) == 1 or mpistrat.size() <= 3
    background: Callable[[], Any] = tensorflow_in_the_background if "tensorflow" in options else \
        nothing_in_the_background
    operations = 0
    with background():
        for seed in range(first, first + count):
            program = Program(seed, sums_in_rank_order)
            program.run()
            operations += program.operations
    print(f"rank {mpistrat.rank()}: {count} programs of {operations} collectives are right", flush=True)


main()
