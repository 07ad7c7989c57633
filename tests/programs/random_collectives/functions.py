"""Programs in functions, most of whose collectives have no names, behind nodes that take another time on each rank.

One rank may have traced the functions before, in another thread, trace the outer one in each step, and have built
another model. In some programs two threads run a program each, and in some each rank makes another number of steps and
then joins. In some a step ends in an error, on one rank or on all, at any place of the graph, and the script catches
it. Then the results are right, or all ranks get an error.

With "eager" only the functions inside of a program are graphs. Between these it has collectives on arrays (arrays.py),
and no step ends in an error: an eager collective waits for ranks that have left out theirs.
"""

import random
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd

from .arrays import Calls
from .pieces import WHOLE, WIDTH, Graphs, Piece, World, drawn, every, rows, small

FAULTS = ("fault", "fault aside")  # with what follows behind it, or beside it
CALLS = ("call", "call twice")
KINDS = ("sum", "mean", "tape", "named", "gather", "several", "unused", "typed", *(*CALLS, "branch", "loop") * 2)
NOT_WITH_JOIN = ("set", "optimizer", "scattered", "exchanged")
OWN = ("own set", "optimizer", *CALLS)  # in two threads that the ranks cannot tell apart
# What ends the engines after an error that a script has caught.
ENDED = (r"ended in an error|disagree on how many executions|This is a deadlock|"
         r"with the same name as another one that is currently being processed|cannot tell the two apart")
# Ranks that wait for each other in two process sets or threads: the main thread waits for threads with a limit.
STALLED = "Some ranks wait for a collective that other ranks have not called"


@dataclass(frozen=True)
class Program:
    """Programs for one thread, or two threads, that each rank runs `steps[rank]` times.

    `alone` is the rank that has traced and built more, or -1. In step `fails` there is an error on the ranks `failing`.
    """

    threads: tuple[tuple[Piece, ...], ...]
    kind: str  # of the threads: "main", "names", "own" (process sets and optimizers) or "refused"
    steps: tuple[int, ...]
    alone: int
    fails: int
    failing: tuple[int, ...]
    is_eager: bool


def drawn_program(choose: random.Random, size: int, is_eager: bool) -> Program:
    kind = choose.choice(["main"] * 5 + ["names"] * 3 + ["own", "refused"] * (not is_eager))
    joins = kind == "main" and choose.random() < 0.2
    fails = choose.choice([-1, 0, 1, 2]) if kind != "refused" and not is_eager else -1
    failing = (choose.randrange(size),) if choose.random() < 0.3 else tuple(range(size))
    kinds = OWN if kind == "own" else (*KINDS, *(() if joins else NOT_WITH_JOIN))
    kinds += FAULTS * (1 + len(kinds) // 8) if fails >= 0 else ("arrays",) * len(kinds) if is_eager else ()
    steps = tuple(choose.randint(0, 4) for _ in range(size)) if joins else (4,) * size
    return Program(tuple(drawn(choose, kinds, 2) for _ in range(1 if kind == "main" else 2)), kind, steps,
                   choose.randint(-1, size - 1), fails, failing, is_eager)


class Part(Graphs):
    """The step of one thread, and what it is made of."""

    def __init__(self, program: Program, thread: int, members: Sequence[tuple[int, ...]], sets: Sequence[Any]):
        super().__init__()
        self.whole, self._thread, self._members, self._sets = program.threads[thread], thread, members, sets
        # Optimizers are made in the same order on all ranks, also on one that traces inner functions first.
        self._made = {piece: self._optimizer() for piece in every(self.whole) if piece.kind == "optimizer"}
        self._calls = {piece: Calls(piece.number, members, program.steps, has_anonymous=program.kind == "main")
                       for piece in every(self.whole) if piece.kind == "arrays"}
        self.number, self._own = 0, random.Random(f"{self.rank} {self.whole}")
        self.fails = tf.Variable(False)

        def step(x: tf.Tensor, salt: int) -> tf.Tensor:
            y = self.graph(self.whole, x)
            if program.kind != "own":
                hvd.allreduce(y, op=hvd.Sum)
            with tf.control_dependencies([tf.debugging.assert_equal(self.fails & (y[0] < 1e9), False)]):
                return tf.identity(y)

        self.step = step if program.is_eager else tf.function(step, autograph=False)
        if program.alone == self.rank and not program.is_eager:
            for piece in self.whole:
                if piece.kind in CALLS:
                    self._functions[piece] = self.function(piece)
                    self._functions[piece].get_concrete_function(tf.TensorSpec([WIDTH]))
            self.step.get_concrete_function(tf.TensorSpec([WIDTH]), 0)

    def function(self, piece: Piece) -> Callable[[tf.Tensor], tf.Tensor]:
        has_arrays = any(inner.kind == "arrays" for inner in every(piece.inner))
        return (lambda x: self.graph(piece.inner, x)) if has_arrays else super().function(piece)

    @staticmethod
    def _optimizer() -> tuple[Any, Any]:
        variable = keras.Variable(np.zeros(WIDTH, np.float32))
        optimizer = mpistrat.keras.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build([variable])
        return optimizer, variable

    def begin_anew(self) -> None:
        """Some optimizers have done their part in a step that has failed, and some have not."""
        for _, variable in self._made.values():
            variable.assign(np.zeros(WIDTH, np.float32))

    def place_of(self, piece: Piece) -> int:
        return 1 + self._thread if piece.kind == "own set" else piece.number % len(self._members)

    def members_of(self, piece: Piece) -> tuple[int, ...]:
        return self._members[self.place_of(piece)]

    def _late(self, x: tf.Tensor, number: int) -> tf.Tensor:
        """`x`, after a time that is another one on each rank."""
        seconds = (number * (self.rank + 2)) % 5 * 0.002

        def wait(value: np.ndarray) -> np.ndarray:
            time.sleep(seconds)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype, stateful=False), x.shape)

    def graph(self, whole: Sequence[Piece], x: tf.Tensor) -> tf.Tensor:
        aside = []
        for piece in whole:
            late = self._late(x, piece.number)
            if piece.kind in FAULTS:
                diagonal = tf.where(self.fails, 0.0, 1.0) + 0.0 * late[0]
                zeros = 0.0 * tf.linalg.inv(tf.eye(WIDTH) * diagonal)[0]
                if piece.kind == "fault":
                    x += zeros
                else:
                    aside.append(zeros)
            else:
                x = self.graph_of(piece, late)
        return tf.add_n([x, *aside])

    def graph_of(self, piece: Piece, x: tf.Tensor) -> tf.Tensor:
        if piece.kind == "arrays":
            self._calls[piece].run(self.number, self._sets, self._own)
            return x
        if piece.kind == "tape":
            weights = tf.ones_like(x)
            with tf.GradientTape() as tape:
                tape.watch(weights)
                loss = tf.reduce_sum(weights * x * WHOLE)
            return small(x + hvd.DistributedGradientTape(tape).gradient(loss, weights))
        if piece.kind == "optimizer":
            optimizer, variable = self._made[piece]
            optimizer.apply([x * WHOLE], [variable])
            return small(x + variable.value)
        if piece.kind in ("set", "own set"):
            return x if self.rank not in self.members_of(piece) else small(
                x + hvd.allreduce(x, op=hvd.Sum, process_set=self._sets[self.place_of(piece)]))
        return super().graph_of(piece, x)


class Rank:
    def __init__(self, members: Sequence[tuple[int, ...]]):
        self.rank, self.size = hvd.rank(), hvd.size()
        self._members = members
        self._sets = sets_of(members)

    def close(self) -> None:
        for process_set in self._sets[1:]:
            mpistrat.remove_process_set(process_set)

    def run(self, program: Program) -> None:
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

    def _require_all_or_none(self, program: Program, errors: list[Exception]) -> None:
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

    def _in_threads(self, program: Program, errors: list[Exception]) -> None:
        together = threading.Barrier(2)
        is_made_here = program.kind == "own" or program.alone >= 0
        parts = [Part(program, number, self._members, self._sets) if is_made_here else None for number in range(2)]

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
    def _guarded(run: Callable[[int], None], number: int, program: Program) -> None:
        try:
            run(number)
        except BaseException:
            abort(program)

    def _run_part(self, program: Program, thread: int, errors: list[Exception], part: Part | None = None) -> None:
        part = part or Part(program, thread, self._members, self._sets)
        state: dict[int, Any] = {}
        for number in range(program.steps[self.rank]):
            ranks = [r for r in range(self.size) if program.steps[r] > number]
            given = np.array([[(7 * r + 5 * c + number) % 17 for c in range(WIDTH)] for r in ranks], np.float32)
            wanted, _ = rows(part.whole, given, World(ranks, members_of=part.members_of, state=state))
            mine = ranks.index(self.rank)
            is_failing = number == program.fails and bool({*program.failing} & {*ranks})
            fails = is_failing and self.rank in program.failing
            part.fails.assign(fails)
            part.number = number
            try:
                got = part.step(tf.constant(given[mine]), number if program.alone == self.rank else 0)
            except (tf.errors.OpError, mpistrat.MpistratError) as error:
                if not fails or re.search(ENDED, str(error)):
                    errors.append(error)
                    return
            else:
                assert not fails, program
                np.testing.assert_array_equal(got, wanted[mine], err_msg=f"step {number} of {program}")
            if number == program.fails:
                part.begin_anew()
                state.clear()


def sets_of(members: Sequence[tuple[int, ...]]) -> list[Any]:
    """The process sets of these ranks, of which the first are all."""
    return [hvd.global_process_set, *map(mpistrat.add_process_set, members[1:])]


def abort(program: Any) -> None:
    """End the job at once, also from a thread."""
    print(f"rank {hvd.rank()}: {program}\n{traceback.format_exc()}", flush=True)
    from mpi4py import MPI  # after init, which knows the threads that MPI starts
    MPI.COMM_WORLD.Abort(1)


def run(number: int, options: frozenset[str]) -> None:
    """Run the program of that number on all ranks; ends the job if it is wrong."""
    size = hvd.size()
    members = [tuple(range(size)), tuple(range(size - 1)), tuple(range(1, size)), (0, size - 1)]
    program = drawn_program(random.Random(number), size, "eager" in options)
    own = Rank(list(dict.fromkeys(members)))
    try:
        own.run(program)
    except BaseException:
        abort(program)
    own.close()
