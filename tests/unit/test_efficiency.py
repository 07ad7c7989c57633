"""`mpistrat run --efficiency`: what a rank measures, and what is made of it."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from mpistrat.cli.main import main
from mpistrat.cli.run import Speed, measure_efficiency, sentence, speed_of
from mpistrat.cli.supervisor import Outcome
from mpistrat.core.errors import LaunchError
from mpistrat.core.slowest import Waits
from mpistrat.process import report, step_timer
from mpistrat.process.launch_env import RUN_STEPS
from mpistrat.process.report import ReportReader
from mpistrat.process.step_timer import StepTimer, StepTimes


def waits_between(began_s: float, ended_s: float) -> Waits:
    """A quarter of the time is spent in waiting for ranks."""
    return Waits(ended_s - began_s, (ended_s - began_s) / 4)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[StepTimes]:
    """What the rank has said it has measured. A step takes one second."""
    lines: list[StepTimes] = []
    clock = iter(range(1000))
    monkeypatch.setattr(step_timer.time, "perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr(report, "tell", lambda rank, text, environ: lines.append(
        StepTimes(**json.loads(text.removeprefix("measures ")))))
    return lines


def test_the_first_two_steps_are_not_timed(told: list[StepTimes]) -> None:
    timer = StepTimer(10, 0)
    for step in range(1, 10):
        timer.end_step(1, 32 * step, False, waits_between)
        timer.end_script()
    assert told == []
    timer.end_step(1, 320, False, waits_between)
    with pytest.raises(SystemExit):
        timer.end_script()
    assert told == [StepTimes(8, 8.0, 256, False, 10, [8.0, 2.0, 0.0, 0.0])]
    timer.end_step(1, 352, False, waits_between)  # In a graph that goes on until it returns.
    timer.tell_of_early_end()
    assert len(told) == 1


def test_several_steps_in_one_execution_are_timed_together(told: list[StepTimes]) -> None:
    timer = StepTimer(10, 0)
    for _ in range(3):
        timer.end_step(5, None, True, waits_between)
    assert told == [StepTimes(5, 1.0, None, True, 15, [1.0, 0.25, 0.0, 0.0])]


def test_a_script_that_is_too_short_says_how_many_steps_it_had(told: list[StepTimes]) -> None:
    timer = StepTimer(10, 0)
    timer.end_step(1, None, False, waits_between)
    timer.end_script()
    timer.tell_of_early_end()
    assert told == [StepTimes(0, 0.0, None, False, 1, [0.0] * 4)]


def test_the_variable_is_not_for_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timer, "_timer", None)
    monkeypatch.setattr(step_timer.atexit, "register", lambda function: None)
    environ = {RUN_STEPS: "7", "PMI_RANK": "3"}
    assert step_timer.current({}) is None
    assert isinstance(step_timer.current(environ), StepTimer)
    assert environ == {"PMI_RANK": "3"}


def test_what_a_rank_has_measured_is_read_among_other_lines() -> None:
    reader = ReportReader()
    assert reader.take(b'[1,3]<stderr>: [mpistrat] rank 3 measures {"steps": 8}\n') == b"[1,3]<stderr>: "
    assert reader.take(b"[mpistrat] rank 3 measures nothing\n") is None
    assert reader.measured == {3: '{"steps": 8}'}


ONE = {0: StepTimes(10, 2.0, 320, False, 12)}
TWO = {0: StepTimes(10, 2.0, 320, False, 12), 1: StepTimes(10, 2.5, 310, False, 12)}
WAITS = {0: replace(TWO[0], waits=Waits(2.0, 0.5, 0.5, 0.9)), 1: replace(TWO[1], waits=Waits(2.0, 0.1, 0.1))}


def without_rows(times: Mapping[int, StepTimes], is_global: bool) -> dict[int, StepTimes]:
    return {rank: replace(each, rows=None, is_global=is_global) for rank, each in times.items()}


@pytest.mark.parametrize("one, two, expected", [
    (ONE, TWO, "2 ranks train 1.57 times as fast as one, an efficiency of 79%: 252 rows per second, and 160 on one "
               "rank."),
    (without_rows(ONE, False), without_rows(TWO, False), "2 ranks train 1.6 times as fast as one, an efficiency of "
     "80%: 4 steps per second, and 5 on one rank, if each rank's batch is as large as that of the one rank."),
    (without_rows(ONE, True), without_rows(TWO, True), "2 ranks train 0.8 times as fast as one, an efficiency of 40%: "
     "4 steps per second, and 5 on one rank."),
    (ONE, WAITS, "2 ranks train 1.57 times as fast as one, an efficiency of 79%: 252 rows per second, and 160 on one "
                 "rank; collectives took 30% of the time on average (75% of it during the backward pass); the "
                 "slowest was rank 1, for which the others waited 20% of their time."),
])
def test_the_sentence(one: Mapping[int, StepTimes], two: Mapping[int, StepTimes], expected: str) -> None:
    assert sentence(speed_of(one, 1, 12), speed_of(two, 2, 12), 2) == expected


def test_the_slowest_rank_decides() -> None:
    assert speed_of(TWO, 2, 12) == Speed(4.0, 252.0, False, "")


@pytest.mark.parametrize("times, complaint", [
    ({0: StepTimes(0, 0.0, None, False, 7)}, "ended after 7 steps, but .* should time 12 steps. Ask for fewer than 7"),
    ({0: StepTimes(0, 0.0, None, False, 0)}, "ended without a step that averages gradients, .* Steps are counted in "
     "fit"),
    ({}, "ended without a step"),
])
def test_a_script_without_enough_steps_is_told(times: Mapping[int, StepTimes], complaint: str) -> None:
    with pytest.raises(LaunchError, match=complaint):
        speed_of(times, 1, 12)


@pytest.mark.parametrize("words, complaint", [
    ("-np 2 --efficiency 2", "at least 3 steps are needed"), ("-np 1 --efficiency 9", "the number of ranks, for"),
    ("--efficiency 9", "Write the number of ranks"), ("-np 2 --elastic --efficiency 9", "--elastic"),
    ("-np 2 --efficiency 9 --merge-stderr-to-stdout", "the ranks' stderr"),
])
def test_options_that_make_no_sense(capsys: Any, words: str, complaint: str) -> None:
    assert main(["run", *words.split(), "true"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("load", "is_told"), [(0.5, False), (1e6, True)])
def test_busy_cores_are_told_at_first(capsys: Any, monkeypatch: pytest.MonkeyPatch, load: float, is_told: bool) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, load, 0.0))
    options = argparse.Namespace(efficiency=9, np=2)
    monkeypatch.setattr("mpistrat.cli.elastic_run.is_asked_for", lambda _: False)
    assert measure_efficiency(options, lambda *_: Outcome(7, "")) == 7
    assert ("other processes use the cores: the load of the last 5 minutes is 1000000.0 on" in capsys.readouterr().err
            ) == is_told


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch, told: list[StepTimes]) -> StepTimer:
    """The timer of this process, for ten steps."""
    pytest.importorskip("tensorflow")
    import mpistrat
    from mpistrat.tensorflow.bridge.private_names import AtomicFunction
    mpistrat.init()
    monkeypatch.setattr(AtomicFunction, "call_flat", AtomicFunction.call_flat)  # It is replaced, and put back.
    made = StepTimer(10, 0)
    monkeypatch.setattr(step_timer, "_timer", made)
    return made


def tape_step() -> Any:
    import tensorflow as tf

    from mpistrat.tensorflow import DistributedGradientTape
    weight = tf.Variable(1.0)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = weight ** 2
        weight.assign_sub(DistributedGradientTape(tape).gradient(loss, [weight])[0])
    return step


@pytest.mark.parametrize("in_graph", [False, True])
def test_averagings_are_counted_where_there_is_no_fit(timer: StepTimer, told: list[StepTimes], in_graph: bool) -> None:
    import tensorflow as tf
    step = tf.function(tape_step()) if in_graph else tape_step()
    with pytest.raises(SystemExit):
        for _ in range(20):
            step()
    assert [(each.steps, each.rows, each.is_global) for each in told] == [(8, None, False)]


def test_a_loop_inside_of_a_graph_ends_when_the_graph_does(timer: StepTimer, told: list[StepTimes]) -> None:
    import tensorflow as tf
    step = tape_step()

    @tf.function
    def epoch() -> None:
        for _ in tf.range(30):
            step()

    with pytest.raises(SystemExit):
        epoch()
    assert [each.steps for each in told] == [8]


def test_a_loop_that_xla_compiles_is_told(timer: StepTimer) -> None:
    import tensorflow as tf
    with pytest.raises(Exception, match="Leave out jit_compile=True while you measure"):  # AutoGraph may wrap it.
        tf.function(tape_step(), jit_compile=True)()


def test_fit_counts_its_steps_and_rows_and_not_its_averagings(timer: StepTimer, told: list[StepTimes]) -> None:
    import keras
    import numpy as np

    import mpistrat.keras as hvd
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(SystemExit):
        model.fit(np.ones((7, 1)), np.ones((7, 1)), batch_size=2, epochs=9, verbose=0)
    # Batches of 2, 2, 2 and 1: those of steps 3 to 10.
    assert [replace(each, waits=Waits()) for each in told] == [StepTimes(8, 8.0, 14, False, 10)]
    assert not timer.is_in_fit
