"""Random programs of all collectives, drawn by hypothesis, against numpy: arrays, eager tensors and tf.function.

A program is the same on all ranks, but for the order of calls where any order is right: asynchronous calls on arrays,
and calls in a graph. Calls are for all ranks or for a process set; the sets overlap. In some programs each rank makes
another number of steps and then joins, and in some a rank disagrees with the others.

In nested programs, the collectives are in functions, branches and loops inside of each other, most of them without
names, and behind nodes that take another time on each rank. One rank may have traced the functions before, in another
thread, trace the outer one in each step, and have built another model. In some programs two threads run a program each.
In some a step ends in an error, on one rank or on all, at any place of the graph, and the script catches it. Then the
results are right, or all ranks get an error.

usage: hypothesis_programs.py PROGRAMS [SEED [NESTED_PROGRAMS [INTER_OP_THREADS]]]
"""

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from tests.support.adasum import adasum_of
from tests.support.dtypes import dtype_of

HALVES = ("float16", "bfloat16")
REDUCED = (*HALVES, "float32", "float64", "int8", "uint8", "int32", "int64")
SENT = (*REDUCED, "bool", "int16")
REDUCTIONS = ("allreduce", "grouped_allreduce")
GATHERS = ("allgather", "grouped_allgather")
SCATTERS = ("reducescatter", "grouped_reducescatter")
KINDS = (*REDUCTIONS * 2, *GATHERS, *SCATTERS, "broadcast", "alltoall", "alltoall_splits", "adasum")
JOINED_KINDS = (*REDUCTIONS * 2, *GATHERS, "broadcast")
ASYNCHRONOUS = ("allreduce", "grouped_allreduce", "allgather", "reducescatter", "broadcast", "alltoall",
                "alltoall_splits", "adasum")
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


@dataclass(frozen=True)
class Call:
    """One collective. `arrays` are dtypes and shapes, without the rows of what is gathered; `members` its ranks."""

    number: int
    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    op: Any
    prescale: float
    postscale: float
    place: int  # of the process set in the list of sets
    members: tuple[int, ...]
    root: int
    disagrees: bool = False  # The last member passes another shape.

    @property
    def name(self) -> str:
        return f"call{self.number}"


@dataclass(frozen=True)
class Program:
    """Calls that each rank makes `steps[rank]` times; then it joins, if the numbers differ."""

    how: str  # arrays, eager or graph
    calls: tuple[Call, ...]
    orders: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]


@st.composite
def calls(draw: st.DrawFn, number: int, how: str, sets: Sequence[tuple[int, ...]], joins: bool,
          steps: tuple[int, ...]) -> Call:
    kind = draw(st.sampled_from([kind for kind in (JOINED_KINDS if joins else KINDS)
                                 if how != "arrays" or kind in ASYNCHRONOUS]))
    place = 0 if joins else draw(st.integers(0, len(sets) - 1))
    members = sets[place]
    reduces = kind in REDUCTIONS or kind in SCATTERS
    dtypes = ("float32", "float64") if kind == "adasum" else REDUCED if reduces else SENT
    op = draw(st.sampled_from(OPS if kind in REDUCTIONS else OPS[:2]))
    scales = draw(st.sampled_from([(1.0, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 0.5)])) if reduces else (1.0, 1.0)
    if joins and op not in OPS[:2]:
        scales = (1.0, 1.0)
    extents = st.integers(0, 5) | st.sampled_from([17, 300, 5000])
    arrays = []
    for _ in range(draw(st.integers(1, 4)) if kind.startswith("grouped") else 1):
        shape = draw(st.lists(extents, max_size=1).map(tuple) | st.tuples(st.integers(0, 9), st.integers(1, 3)))
        if kind in SCATTERS and not shape:
            shape = (draw(st.integers(0, 7)),)
        if kind not in (*REDUCTIONS, *SCATTERS, "broadcast", "adasum"):
            shape = shape[1:]
        arrays.append((draw(st.sampled_from(dtypes)), shape))
    roots = [rank for rank in members if steps[rank] == max(steps)]
    disagrees = not joins and how != "graph" and kind in ("allreduce", "broadcast") and draw(st.integers(0, 9)) == 0
    return Call(number, kind, tuple(arrays), op, *scales, place, members, draw(st.sampled_from(roots)), disagrees)


@st.composite
def programs(draw: st.DrawFn, size: int, sets: Sequence[tuple[int, ...]]) -> Program:
    how = draw(st.sampled_from(["arrays", "arrays", "eager", "graph"]))
    joins = draw(st.integers(0, 3)) == 0
    steps = tuple(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))) if joins else \
        (draw(st.integers(1, 3)),) * size
    count = draw(st.integers(1, 6))
    drawn = tuple(draw(calls(i, how, sets, joins, steps)) for i in range(count))
    same = draw(st.permutations(range(count)))
    # Blocking calls have one order.
    orders = tuple(tuple(same if how == "eager" else draw(st.permutations(range(count)))) for _ in range(size))
    return Program(how, drawn, orders, steps)


# -- values, and what numpy makes of them -----------------------------------------------------------------------------


def splits_of(call: Call, step: int, rank: int) -> np.ndarray:
    """How many rows a rank sends to each member."""
    generator = np.random.default_rng([call.number, step, rank, 1])
    if call.kind == "alltoall":
        return np.full(len(call.members), generator.integers(0, 3), np.int32)
    return generator.integers(0, 4, len(call.members)).astype(np.int32)


def values_of(call: Call, step: int, rank: int) -> list[np.ndarray]:
    """A rank's arrays: small whole numbers, so that sums are exact."""
    made = []
    for place, (dtype, shape) in enumerate(call.arrays):
        generator = np.random.default_rng([call.number, step, place, rank])
        if call.kind in GATHERS:
            shape = (int(generator.integers(0, 4)), *shape)
        elif call.kind.startswith("alltoall"):
            shape = (int(splits_of(call, step, rank).sum()), *shape)
        low = 0 if dtype in ("bool", "uint8") else -2
        made.append(np.asarray(generator.integers(low, 2 if dtype == "bool" else 4, shape)).astype(dtype_of(dtype)))
    return made


def reduced(call: Call, parts: Sequence[np.ndarray]) -> np.ndarray:
    wide = [part.astype(np.float64) * call.prescale for part in parts]
    fold = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}.get(call.op, np.add)
    total = wide[0]
    for part in wide[1:]:
        total = fold(total, part)
    result = total * call.postscale / (len(parts) if call.op == hvd.Average else 1)
    if parts[0].dtype.kind in "iu":
        # Whole numbers wrap around before they are scaled.
        wrapped = np.asarray(total).astype(np.int64).astype(parts[0].dtype).astype(np.float64)
        result = np.trunc(wrapped * call.postscale / (len(parts) if call.op == hvd.Average else 1))
        return np.asarray(result).astype(np.int64).astype(parts[0].dtype)
    return np.asarray(result).astype(parts[0].dtype)


def expected(call: Call, step: int, rank: int, ranks: Sequence[int]) -> list[np.ndarray]:
    """The results on `rank`, if `ranks` take part."""
    if call.kind == "broadcast":
        return values_of(call, step, call.root)
    of_ranks = [values_of(call, step, r) for r in ranks]
    if call.kind in GATHERS:
        return [np.concatenate(parts) for parts in zip(*of_ranks)]
    mine = ranks.index(rank)
    if call.kind.startswith("alltoall"):
        pieces, received = [], []
        for r, (array,) in zip(ranks, of_ranks, strict=True):
            splits = splits_of(call, step, r)
            start = int(splits[:mine].sum())
            pieces.append(array[start:start + splits[mine]])
            received.append(splits[mine])
        data = np.concatenate(pieces)
        return [data] if call.kind == "alltoall" else [data, np.array(received, np.int32)]
    if call.kind == "adasum":
        return [adasum_of([part.astype(np.float64) for part in parts]).astype(parts[0].dtype)
                for parts in zip(*of_ranks)]
    whole = [reduced(call, parts) for parts in zip(*of_ranks)]
    if call.kind not in SCATTERS:
        return whole
    results = []
    for array in whole:
        counts = [len(array) // len(ranks) + (r < len(array) % len(ranks)) for r in range(len(ranks))]
        start = sum(counts[:mine])
        results.append(array[start:start + counts[mine]])
    return results


def assert_equal(results: Sequence[Any], wanted: Sequence[np.ndarray], what: str) -> None:
    assert len(results) == len(wanted), what
    for result, array in zip(results, wanted, strict=True):
        result = np.asarray(result.numpy() if isinstance(result, tf.Tensor) else result)
        assert (result.dtype, result.shape) == (array.dtype, array.shape), \
            f"{what}: {result.dtype}{result.shape}, not {array.dtype}{array.shape}"
        if array.dtype.kind in "iub":
            np.testing.assert_array_equal(result, array, err_msg=what)
        else:
            tolerance = 1e-2 if array.dtype.name in HALVES else 1e-5
            np.testing.assert_allclose(result.astype(np.float64), array.astype(np.float64), rtol=tolerance, atol=1e-6,
                                       err_msg=what)


# -- the calls --------------------------------------------------------------------------------------------------------


def call_of(module: Any, call: Call, arrays: list[Any], splits: Any, process_set: Any, suffix: str = "") -> Any:
    """Make the call in the way of a module: mpistrat, with the suffix "_async" too, or mpistrat.tensorflow."""
    options: dict[str, Any] = {"name": call.name, "process_set": process_set}
    kind = {"adasum": "allreduce", "alltoall_splits": "alltoall"}.get(call.kind, call.kind)
    function = getattr(module, kind + suffix)
    if call.kind in (*REDUCTIONS, *SCATTERS):
        options |= {"op": call.op, "prescale_factor": call.prescale, "postscale_factor": call.postscale}
    elif call.kind == "adasum":
        options |= {"op": hvd.Adasum}
    elif call.kind == "broadcast":
        options |= {"root_rank": call.root}
    elif call.kind == "alltoall_splits":
        options |= {"splits": splits}
    return function(arrays if kind.startswith("grouped") else arrays[0], **options)


def listed(call: Call, results: Any) -> list[Any]:
    return list(results) if call.kind.startswith("grouped") or call.kind == "alltoall_splits" else [results]


class Runner:
    """Runs programs on one rank."""

    def __init__(self, sets: Sequence[Any]):
        self.rank, self.size = hvd.rank(), hvd.size()
        self._sets = sets

    def run(self, program: Program) -> None:
        own = [call for i in program.orders[self.rank] if self.rank in (call := program.calls[i]).members]
        step_function = self._graph(own) if program.how == "graph" else None
        for step in range(program.steps[self.rank]):
            ranks = [r for r in range(self.size) if program.steps[r] > step]
            arrays = {call: self._brought(call, step) for call in own}
            run = {"arrays": self._asynchronously, "eager": self._eagerly}.get(program.how)
            results = run(own, arrays, step) if run else self._in_graph(step_function, own, arrays, step)
            for call, got in results:
                assert_equal(got, expected(call, step, self.rank, [r for r in ranks if r in call.members]),
                             f"step {step} of {call} in {program}")
        if len(set(program.steps)) > 1:
            last = int(hvd.join()) if program.how != "arrays" else mpistrat.join()
            assert len(set(mpistrat.allgather_object(last))) == 1, program

    def _brought(self, call: Call, step: int) -> list[np.ndarray]:
        arrays = values_of(call, step, self.rank)
        if call.disagrees and self.rank == call.members[-1]:
            arrays = [np.zeros((*array.shape, 2), array.dtype) for array in arrays]
        return arrays

    def _asynchronously(self, own: Sequence[Call], arrays: dict, step: int) -> list[tuple[Call, list[Any]]]:
        pending = [(call, call_of(mpistrat, call, arrays[call], splits_of(call, step, self.rank),
                                  self._sets[call.place], "_async")) for call in own]
        return self._collected([(call, lambda handle=handle: handle.wait(120)) for call, handle in pending])

    def _eagerly(self, own: Sequence[Call], arrays: dict, step: int) -> list[tuple[Call, list[Any]]]:
        return self._collected([
            (call, lambda call=call: call_of(hvd, call, [tf.constant(array) for array in arrays[call]],
                                             splits_of(call, step, self.rank), self._sets[call.place]))
            for call in own])

    def _collected(self, calls_: Sequence[tuple[Call, Callable[[], Any]]]) -> list[tuple[Call, list[Any]]]:
        done = []
        for call, get in calls_:
            if call.disagrees and len(call.members) > 1:
                try:
                    get()
                except mpistrat.MismatchError as error:
                    assert f"{call.name}: the ranks disagree on shape" in str(error), error
                else:
                    raise AssertionError(f"no error: {call}")
            else:
                done.append((replace(call, disagrees=False), listed(call, get())))
        return done

    def _graph(self, own: Sequence[Call]) -> Callable:
        signature = [[tf.TensorSpec([None, *shape] if call.kind in GATHERS or call.kind.startswith("alltoall")
                                    else shape, dtype) for dtype, shape in call.arrays] for call in own]
        splits = [tf.TensorSpec([len(call.members)], tf.int32) for call in own]

        @tf.function(input_signature=[signature, splits], autograph=False)
        def step(arrays: list, splits: list) -> list:
            return [call_of(hvd, call, brought, counts, self._sets[call.place])
                    for call, brought, counts in zip(own, arrays, splits, strict=True)]
        return step

    def _in_graph(self, function: Any, own: Sequence[Call], arrays: dict, step: int) -> list[tuple[Call, list[Any]]]:
        results = function([[tf.constant(array) for array in arrays[call]] for call in own],
                           [tf.constant(splits_of(call, step, self.rank)) for call in own])
        return [(call, listed(call, got)) for call, got in zip(own, results, strict=True)]


# -- nested programs --------------------------------------------------------------------------------------------------

WIDTH = 3
WHOLE = 6.0  # The mean of so many times a whole number is whole on up to three ranks.
ALWAYS = ("sum", "mean", "tape", "named", "gather", "several", "unused")
NOT_WITH_JOIN = ("set", "optimizer")
FAULTS = ("fault", "fault aside")  # with what follows behind it, or beside it
NESTS = ("call", "call twice", "branch", "loop")
OWN = ("own set", "optimizer", "call", "call twice")  # in two threads that the ranks cannot tell apart
# What ends the engines after an error that a script has caught.
ENDED = (r"ended in an error|disagree on how many executions|This is a deadlock|"
         r"with the same name as another one that is currently being processed|cannot tell the two apart")
# Ranks that wait for each other in two process sets or threads: the main thread waits for threads with a limit.
STALLED = "Some ranks wait for a collective that other ranks have not called"


@dataclass(frozen=True)
class Piece:
    """A part of a nested program: what it does with this rank's tensor of small whole numbers."""

    kind: str
    number: int
    inner: tuple["Piece", ...] = ()
    other: tuple["Piece", ...] = ()  # of the other branch


@dataclass(frozen=True)
class Nested:
    """Programs for one thread, or two threads, that each rank runs `steps[rank]` times.

    `alone` is the rank that has traced and built more, or -1. In step `fails` there is an error on the ranks `failing`.
    """

    threads: tuple[tuple[Piece, ...], ...]
    kind: str  # of the threads: "main", "names", "own" (process sets and optimizers) or "refused"
    steps: tuple[int, ...]
    alone: int
    fails: int
    failing: tuple[int, ...]


@st.composite
def pieces(draw: st.DrawFn, kinds: tuple[str, ...], depth: int) -> tuple[Piece, ...]:
    found = []
    for kind in draw(st.lists(st.sampled_from([k for k in kinds if depth or k not in NESTS]), min_size=1, max_size=3)):
        inner = draw(pieces(kinds, depth - 1)) if kind in NESTS else ()
        other = draw(pieces(kinds, depth - 1)) if kind == "branch" else ()
        found.append(Piece(kind, draw(st.integers(0, 10**9)), inner, other))
    return tuple(found)


@st.composite
def nested_programs(draw: st.DrawFn, size: int) -> Nested:
    kind = draw(st.sampled_from(["main"] * 5 + ["names"] * 3 + ["own", "refused"]))
    joins = kind == "main" and draw(st.integers(0, 4)) == 0
    fails = draw(st.sampled_from([-1, 0, 1, 2])) if kind != "refused" else -1
    failing = tuple(range(size)) if draw(st.integers(0, 2)) else (draw(st.integers(0, size - 1)),)
    kinds = OWN if kind == "own" else (*ALWAYS, *(() if joins else NOT_WITH_JOIN), *NESTS * 2)
    kinds += FAULTS * (1 + len(kinds) // 8) if fails >= 0 else ()
    steps = tuple(draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))) if joins else (4,) * size
    return Nested(tuple(draw(pieces(kinds, 2)) for _ in range(1 if kind == "main" else 2)), kind, steps,
                  draw(st.integers(-1, size - 1)), fails, failing)


def every(whole: Sequence[Piece]) -> Iterator[Piece]:
    """All pieces in a program."""
    for piece in whole:
        yield piece
        yield from every(piece.inner + piece.other)


def small(x: Any) -> Any:
    return x % 17.0


class NestedRunner:
    """Runs nested programs on one rank."""

    def __init__(self, members: Sequence[tuple[int, ...]]):
        self.rank, self.size = hvd.rank(), hvd.size()
        self._members = members
        self._sets = sets_of(members)

    def run(self, program: Nested) -> None:
        if program.alone == self.rank:
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(mpistrat.keras.DistributedOptimizer(keras.optimizers.SGD()), "mse")
            del model
        errors: list[Exception] = []
        if program.kind == "main":
            self._run_part(program, 0, errors)
        else:
            self._in_threads(program, errors)
        if program.kind == "refused":
            assert len(errors) == 2 and all("cannot tell the two apart" in str(e) for e in errors), errors
            errors.clear()
        if len(set(program.steps)) > 1 and not errors:
            try:
                last = int(tf.function(hvd.join)()) if program.alone < 0 else int(hvd.join())
                assert len(set(mpistrat.allgather_object(last))) == 1, program
            except (tf.errors.OpError, mpistrat.MpistratError) as error:
                errors.append(error)
        self._require_all_or_none(program, errors)

    def _require_all_or_none(self, program: Nested, errors: list[Exception]) -> None:
        """Require that all ranks of a process set have ended, or none has."""
        ends = []
        for place, members in enumerate(self._members):
            if self.rank in members:
                try:
                    total = mpistrat.allreduce(1.0, op=mpistrat.Sum, name="probe", process_set=self._sets[place])
                    assert total == len(members), program
                except mpistrat.MpistratError as error:
                    ends.append(place)
                    errors.append(error)
        from mpi4py import MPI  # after init, which knows the threads that MPI starts
        of_all = MPI.COMM_WORLD.allgather(ends)
        for place, members in enumerate(self._members):
            assert len({place in of_all[rank] for rank in members}) == 1, f"ended: {of_all} in {program}"
        may_stall = len(program.threads) > 1 or any(piece.kind == "set" for piece in every(program.threads[0]))
        for error in errors:
            known = re.search(f"{ENDED}|{STALLED}" if may_stall else ENDED, str(error))
            assert (program.fails >= 0 or program.kind == "refused") and known, str(error)
        if any(of_all):
            mpistrat.shutdown()
            mpistrat.init()
            self._sets = sets_of(self._members)

    def _in_threads(self, program: Nested, errors: list[Exception]) -> None:
        together = threading.Barrier(2)
        parts = [self._part(program, number) if program.kind == "own" or program.alone >= 0 else None
                 for number in range(2)]

        def run(number: int) -> None:
            together.wait(120)
            try:
                self._run_part(program, number, errors, parts[number])
            finally:
                together.wait(240)

        names = [f"member {number}" if program.kind == "names" else None for number in range(2)]
        threads = [threading.Thread(target=self._guarded, args=(run, number, program), name=name)
                   for number, name in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(240)
            assert not thread.is_alive(), program

    @staticmethod
    def _guarded(run: Callable[[int], None], number: int, program: Nested) -> None:
        try:
            run(number)
        except BaseException:
            abort(program)

    def _part(self, program: Nested, number: int) -> tuple[Callable, dict]:
        """The step of a thread, and what it is made of."""
        whole = program.threads[number]
        # Optimizers are made in the same order on all ranks, also on one that traces inner functions first.
        made: dict[Any, Any] = {piece: self._optimizer() for piece in every(whole) if piece.kind == "optimizer"}
        made["thread"], made["fails"] = number, tf.Variable(False)

        @tf.function(autograph=False)
        def step(x: tf.Tensor, salt: int) -> tf.Tensor:
            y = self._graph(whole, x, made)
            if program.kind != "own":
                hvd.allreduce(y, op=hvd.Sum)
            with tf.control_dependencies([tf.debugging.assert_equal(made["fails"] & (y[0] < 1e9), False)]):
                return tf.identity(y)

        if program.alone == self.rank:
            for piece in whole:
                if piece.kind.startswith("call"):
                    self._function(piece, made).get_concrete_function(tf.TensorSpec([WIDTH]))
            step.get_concrete_function(tf.TensorSpec([WIDTH]), 0)
        return step, made

    def _run_part(self, program: Nested, thread: int, errors: list[Exception], part: Any = None) -> None:
        step, made = part or self._part(program, thread)
        whole = program.threads[thread]
        state: dict[int, np.ndarray] = {}
        for number in range(program.steps[self.rank]):
            ranks = [r for r in range(self.size) if program.steps[r] > number]
            rows = np.array([[(7 * r + 5 * c + number) % 17 for c in range(WIDTH)] for r in ranks], np.float32)
            wanted = self._rows(whole, rows, ranks, state, thread)[ranks.index(self.rank)]
            is_failing = number == program.fails and bool({*program.failing} & {*ranks})
            fails = is_failing and self.rank in program.failing
            made["fails"].assign(fails)
            try:
                got = step(tf.constant(rows[ranks.index(self.rank)]), number if program.alone == self.rank else 0)
            except (tf.errors.OpError, mpistrat.MpistratError) as error:
                if not fails or re.search(ENDED, str(error)):
                    errors.append(error)
                    return
            else:
                assert not fails, program
                np.testing.assert_array_equal(got, wanted, err_msg=f"step {number} of {program}")
            if number == program.fails:  # Some optimizers have done their part, and some have not.
                for piece in every(whole):
                    if piece.kind == "optimizer":
                        made[piece][1].assign(np.zeros(WIDTH, np.float32))
                state.clear()

    def _late(self, x: tf.Tensor, number: int) -> tf.Tensor:
        """`x`, after a time that is another one on each rank."""
        seconds = (number * (self.rank + 2)) % 5 * 0.002

        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)

    def _graph(self, whole: tuple[Piece, ...], x: tf.Tensor, made: dict) -> tf.Tensor:
        aside = []
        for piece in whole:
            late = self._late(x, piece.number)
            if piece.kind in FAULTS:
                diagonal = tf.where(made["fails"], 0.0, 1.0) + 0.0 * late[0]
                zeros = 0.0 * tf.linalg.inv(tf.eye(WIDTH) * diagonal)[0]
                if piece.kind == "fault":
                    x += zeros
                else:
                    aside.append(zeros)
            else:
                x = self._graph_of(piece, late, made)
        return tf.add_n([x, *aside])

    def _graph_of(self, piece: Piece, x: tf.Tensor, made: dict) -> tf.Tensor:
        if piece.kind == "tape":
            weights = tf.ones_like(x)
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = tf.reduce_sum(weights * x * WHOLE)
            return small(x + hvd.DistributedGradientTape(tape).gradient(loss, weights))
        if piece.kind == "optimizer":
            optimizer, variable = made[piece]
            optimizer.apply([x * WHOLE], [variable])
            return small(x + variable.value)
        if piece.kind == "several":
            order = range(3) if self.rank % 2 else reversed(range(3))
            parts = {number: x + float(number) for number in order}
            return small(x + tf.add_n([(number + 1.0) * hvd.allreduce(parts[number], op=hvd.Sum)
                                       for number in range(3)]))
        if piece.kind in ("set", "own set"):
            place = self._place_of(piece, made["thread"])
            return x if self.rank not in self._members[place] else small(
                x + hvd.allreduce(x, op=hvd.Sum, process_set=self._sets[place]))
        if piece.kind.startswith("call"):
            function = self._function(piece, made)
            return function(function(x)) if piece.kind == "call twice" else function(x)
        if piece.kind == "gather":
            return small(x + tf.reduce_max(hvd.allgather(x[tf.newaxis]), 0))
        if piece.kind == "unused":
            hvd.allreduce(2.0 * x)
            return x
        if piece.kind == "mean":
            return small(x + hvd.allreduce(x * WHOLE))
        total = hvd.allreduce(x, op=hvd.Sum, name=f"named{piece.number}" if piece.kind == "named" else None)
        if piece.kind == "branch":
            return tf.cond(small(total)[0] < 8, lambda: self._graph(piece.inner, x, made),
                           lambda: self._graph(piece.other, x, made))
        if piece.kind == "loop":
            times = tf.cast(total[1] % 3.0, tf.int32)
            return tf.while_loop(lambda i, _: i < times, lambda i, v: (i + 1, self._graph(piece.inner, v, made)),
                                 (0, x))[1]
        return small(x + total)

    def _place_of(self, piece: Piece, thread: int) -> int:
        return 1 + thread if piece.kind == "own set" else piece.number % len(self._members)

    def _optimizer(self) -> tuple[Any, Any]:
        variable = keras.Variable(np.zeros(WIDTH, np.float32))
        optimizer = mpistrat.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
        return optimizer, variable

    def _function(self, piece: Piece, made: dict) -> Any:
        if piece not in made:
            def call(x: tf.Tensor) -> tf.Tensor:  # All of them have one name.
                return self._graph(piece.inner, x, made)
            made[piece] = tf.function(call, autograph=False)
        return made[piece]

    def _rows(self, whole: tuple[Piece, ...], x: np.ndarray, ranks: Sequence[int], state: dict,
              thread: int) -> np.ndarray:
        """The tensors of all ranks, one below the other."""
        for piece in whole:
            x = self._rows_of(piece, x, ranks, state, thread)
        return x

    def _rows_of(self, piece: Piece, x: np.ndarray, ranks: Sequence[int], state: dict,
                 thread: int) -> np.ndarray:
        total = x.sum(0)
        if piece.kind in ("mean", "tape"):
            return small(x + WHOLE * total / len(ranks))
        if piece.kind == "optimizer":
            state[piece.number] = state.get(piece.number, 0) - WHOLE * total / len(ranks)
            return small(x + state[piece.number])
        if piece.kind == "several":
            return small(x + sum((number + 1) * (x + number).sum(0) for number in range(3)))
        if piece.kind in ("set", "own set"):
            members = list(self._members[self._place_of(piece, thread)])
            return np.array([small(row + x[members].sum(0)) if rank in members else row
                             for rank, row in zip(ranks, x, strict=True)])
        if piece.kind == "gather":
            return small(x + x.max(0))
        if piece.kind == "unused" or piece.kind in FAULTS:
            return x
        if piece.kind == "branch":
            return self._rows(piece.inner if small(total)[0] < 8 else piece.other, x, ranks, state, thread)
        if piece.kind in NESTS:
            times = int(total[1] % 3) if piece.kind == "loop" else 2 if piece.kind == "call twice" else 1
            for _ in range(times):
                x = self._rows(piece.inner, x, ranks, state, thread)
            return x
        return small(x + total)


def sets_of(members: Sequence[tuple[int, ...]]) -> list[Any]:
    """The process sets of these ranks, of which the first are all."""
    return [hvd.global_process_set, *map(mpistrat.add_process_set, members[1:])]


def abort(program: Any) -> None:
    """End the job at once: hypothesis would run the program again, on this rank alone."""
    print(f"rank {hvd.rank()}: {program}\n{traceback.format_exc()}", flush=True)
    from mpi4py import MPI  # after init, which knows the threads that MPI starts
    MPI.COMM_WORLD.Abort(1)


def run_all(title: str, drawn: st.SearchStrategy, count: int, first: int, run: Callable[[Any], None]) -> None:
    """Run `count` programs on this rank."""
    done = 0

    @seed(first)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(drawn)
    def one(program: Any) -> None:
        nonlocal done
        try:
            assert len(set(mpistrat.allgather_object(repr(program)))) == 1, "the ranks have drawn different programs"
            run(program)
        except BaseException:
            abort(program)
        done += 1

    one()
    print(f"rank {hvd.rank()}: {done} {title} are right", flush=True)


def main() -> None:
    """Run the programs."""
    count, first, nested, threads = [int(word) for word in sys.argv[1:]] + [0] * (5 - len(sys.argv))
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    tf.get_logger().setLevel("ERROR")  # It warns of functions that are traced often, which is the purpose.
    os.environ.setdefault("MPISTRAT_STALL_CHECK_TIME_SECONDS", "10")
    os.environ.setdefault("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "30")
    hvd.init()
    size = hvd.size()
    ranks = list(dict.fromkeys([tuple(range(size)), tuple(range(size - 1)), tuple(range(1, size)), (0, size - 1)]))
    if count:
        sets = sets_of(ranks)
        run_all("programs", programs(size, ranks), count, first, Runner(sets).run)
        for process_set in sets[1:]:  # The nested programs register them again.
            mpistrat.remove_process_set(process_set)
    if nested:
        run_all("nested programs", nested_programs(size), nested, first, NestedRunner(ranks).run)


if __name__ == "__main__":
    main()
