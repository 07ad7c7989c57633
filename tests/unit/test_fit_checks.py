"""What the ranks may differ in when they train with fit, and what they may not. Decisions only, in one process."""

from dataclasses import replace

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")

from mpistrat.keras.bridge.compared import rates_of  # noqa: E402
from mpistrat.keras.bridge.measures import shared_names  # noqa: E402
from mpistrat.keras.bridge.training import (  # noqa: E402
    DistributedTraining,
    SaveSchedule,
    training_of,
)
from mpistrat.keras.fit.fit_callbacks import digest_of_rows  # noqa: E402
from mpistrat.keras.fit.fit_checks import (  # noqa: E402
    Begin,
    Progress,
    Step,
    have_same_rows,
    problem_at_begin,
    problem_between_epochs,
    problem_of_rates,
    readers,
    setters,
)
from mpistrat.tensorflow.consistency import (  # noqa: E402
    by_rank,
    describe_weights,
    differing,
    digest_of,
    is_same_data,
)

BEGIN = Begin(steps=8, epochs=3, weights=4, collective=(), readers=(), averages_statistics=True)


@pytest.mark.parametrize("other", [
    BEGIN, replace(BEGIN, steps=None), replace(BEGIN, epochs=None), replace(BEGIN, readers=("EarlyStopping",)),
    replace(BEGIN, weights=0)], ids=["same", "unknown steps", "unknown epochs", "readers", "weights come later"])
def test_ranks_may_begin_like_this(other: Begin) -> None:
    assert problem_at_begin([BEGIN, other, BEGIN]) == ""


@pytest.mark.parametrize("states", [
    [BEGIN, replace(BEGIN, readers=("EarlyStopping",))], [Progress(2), Progress(2)],
    [Progress(2, True, " (stopped by EarlyStopping)"), Progress(2, True)]], ids=["begin", "go on", "end"])
def test_ranks_are_together(states: list) -> None:
    assert problem_between_epochs(states, False) == ""


@pytest.mark.parametrize(("states", "said", "advice"), [
    ([Progress(2), Progress(2, True, " (stopped by EarlyStopping)"), Progress(2)],
     "ranks [0, 2] go on to epoch 3; ranks [1] ended training after epoch 2 (stopped by EarlyStopping).",
     "A rank that stops alone leaves the others without its gradients. Give all ranks the same callbacks"),
    ([BEGIN, Progress(1)], "ranks [0] begin to train; ranks [1] go on to epoch 2.", "the same epochs="),
    ([Step(0, 2, ()), Progress(1)], "ranks [0] begin step 2 of epoch 1; ranks [1] go on to epoch 2.", "the same ep"),
    ([Step(0, 2, ()), Step(0, 1, ())], "ranks [0] begin step 2 of epoch 1; ranks [1] go on to epoch 1.", "the same e")],
    ids=["one stops", "one begins anew", "one is in a step", "other steps"])
def test_ranks_that_are_not_together_are_named(states: list, said: str, advice: str) -> None:
    problem = problem_between_epochs(states, False)
    assert said in problem
    assert advice in problem


def step(rate: float, *names: str) -> Step:
    return Step(1, 1, (), (("learning_rate of SGD", rate), ("momentum of SGD", 0.5)), names)


def test_rates_are_compared_by_what_processors_may_round() -> None:
    assert problem_of_rates([step(0.1), step(0.1 * (1 + 1e-7))]) == ""
    assert problem_of_rates([step(float("nan")), step(float("nan"))]) == ""
    assert problem_of_rates([step(0.1), Step(1, 1)]) == ""  # Rates that not all ranks know are not compared.
    assert "learning_rate of SGD: 0.1 on ranks [0, 2]; 0.1001 on ranks [1]. Their weights" in problem_of_rates(
        [step(0.1), step(0.1001), step(0.1)])


def test_callbacks_that_may_set_a_rate_on_some_ranks_only_are_named() -> None:
    class Mine(keras.callbacks.Callback):
        pass

    found = setters([keras.callbacks.ReduceLROnPlateau(), Mine(), keras.callbacks.CSVLogger("a.csv")])
    assert found == ("Mine", "ReduceLROnPlateau")
    text = problem_of_rates([step(0.1, *found), step(0.2, "Mine"), step(0.1, "Mine")])
    assert text.endswith("Only ranks [0] have a ReduceLROnPlateau: pass it to fit on all ranks.")


def test_rates_are_those_of_all_parts_of_an_optimizer() -> None:
    class Own(keras.optimizers.SGD):
        def __init__(self, pull: float, **arguments: float):
            super().__init__(**arguments)
            self.pull = pull

    own = keras.optimizers.LossScaleOptimizer(Own(0.25, learning_rate=0.5, weight_decay=0.125), initial_scale=8.0)
    own.build([keras.Variable([1.0])])
    found = dict(rates_of([own, own.inner_optimizer]))
    assert found["pull of Own"] == 0.25
    assert found["learning_rate of Own"] == 0.5
    assert found["weight_decay of Own"] == 0.125
    assert found["dynamic_scale of LossScaleOptimizer"] == 8.0
    assert "learning_rate of LossScaleOptimizer" not in found
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    assert dict(rates_of([keras.optimizers.SGD(schedule)]))["learning_rate of SGD"] == 0.5
    assert "learning_rate of SGD" not in dict(rates_of([keras.optimizers.SGD(lambda *_: 0.5)]))


def test_a_digest_tells_dtypes_and_shapes_apart() -> None:
    numbers = np.arange(3000.0)
    for other in (numbers.astype("f"), numbers.reshape(2, -1), numbers[:2999], np.where(numbers == 0, -0.0, numbers)):
        assert digest_of(other) != digest_of(numbers) == digest_of(numbers.copy())
    assert digest_of(np.array(1.0)) != digest_of(np.array(2.0))
    assert digest_of(np.empty((0, 3))) != digest_of(np.empty((0, 2)))


@pytest.mark.parametrize("width", [256, 300, 512, 768, 1024, 2048, 4096])
def test_a_digest_of_an_embedding_tells_the_order_of_its_rows(width: int) -> None:
    rows = np.random.default_rng(1).normal(size=(40, width)).astype(np.float32)
    assert digest_of(rows[::-1]) != digest_of(rows)


@pytest.mark.parametrize("elements", [40, 3000, 600_000])
def test_a_digest_sees_blocks_that_change_places_and_bits_that_change(elements: int) -> None:
    generator = np.random.default_rng(elements)
    numbers = generator.normal(size=elements).astype(np.float32)
    digest = digest_of(numbers)
    # In pairs of float32: any distances, and those of one, or of both, of the numbers in the digest.
    distances = [2 * 509, 2 * 521, 4 * 509, 2 * 521 * 7, 2 * 509 * 521]
    for distance in [*(each for each in distances if each < elements), *generator.integers(1, elements, 60)]:
        first = generator.integers(0, elements - distance)
        length = generator.integers(1, min(distance, elements - distance - first) + 1)
        one, other = slice(first, first + length), slice(first + distance, first + distance + length)
        swapped = numbers.copy()
        swapped[one], swapped[other] = numbers[other], numbers[one]
        assert digest_of(swapped) != digest, (distance, first, length)
        flipped = numbers.copy()
        flipped.view(np.uint32)[first] ^= np.uint32(1 << generator.integers(0, 32))
        assert digest_of(flipped) != digest, first
        signs = numbers.copy()
        signs[[first, first + distance]] *= -1
        assert digest_of(signs) != digest, (distance, first)


def test_callbacks_that_decide_by_metrics_need_averaged_ones() -> None:
    early = keras.callbacks.EarlyStopping()
    plateau, average = keras.callbacks.ReduceLROnPlateau(), hvd.callbacks.MetricAverageCallback()
    best, every = (keras.callbacks.ModelCheckpoint("a.keras", save_best_only=only) for only in (True, False))
    assert readers([early, plateau, best, every]) == ["EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint"]
    assert readers([every, plateau, average, early]) == ["ReduceLROnPlateau"]
    assert readers([average, early, plateau, best]) == []
    assert readers([]) == []


def test_metrics_that_all_ranks_have_are_averaged() -> None:
    one, two = np.float64(1.0), np.ones(2)
    assert shared_names([{"loss": one, "acc": one, "val": one, "f1": two, "each": two}, {
        "loss": one, "acc": one, "f1": two, "each": np.ones(3)}, {"acc": one, "loss": one, "x": one, "f1": two}]) == (
            ["acc", "f1", "loss"], {"val": [0], "x": [2], "each of shape (2,)": [0], "each of shape (3,)": [1]})


def test_rows_are_the_same_if_all_ranks_know_them_and_have_the_same() -> None:
    assert have_same_rows([1, 1])
    assert not any(map(have_same_rows, ([1, 1, 2], [1, 0], [0, 0], [1])))


ROWS = np.arange(24.0).reshape(12, 2)


@pytest.mark.parametrize(("inputs", "others", "is_equal"), [
    (ROWS, ROWS.copy(), True), (ROWS, ROWS + 1, False), (ROWS, ROWS[:11], False), (ROWS, ROWS.reshape(12, 2, 1), False),
    ([ROWS, None], [tf.constant(ROWS), None], True), ({"a": ROWS}, {"a": -ROWS}, False), ([ROWS, ROWS], ROWS, False),
    (ROWS, np.where(np.arange(12)[:, None] == 11, 0.0, ROWS), False)],
    ids=["same", "values", "fewer", "shape", "tensor", "dict", "two", "last row"])
def test_a_digest_tells_rows_apart(inputs: object, others: object, is_equal: bool) -> None:
    assert digest_of_rows(inputs) != 0
    assert (digest_of_rows(inputs) == digest_of_rows(others)) is is_equal


@pytest.mark.parametrize("inputs", [
    None, iter([ROWS]), [1.0, 2.0], np.array(["a", None]), np.empty((0, 2)), np.array(1.0), tf.constant(["a"])],
    ids=["nothing", "generator", "list", "objects", "empty", "scalar", "strings"])
def test_other_inputs_have_no_digest(inputs: object) -> None:
    assert digest_of_rows(inputs) == 0


@pytest.mark.parametrize("steps", [1, 3], ids=["step by step", "three steps at once"])
def test_a_schedule_is_that_of_keras(steps: int) -> None:
    checkpoint = keras.callbacks.ModelCheckpoint("a.keras", save_freq=4)
    saves: list[int] = []
    checkpoint._save_model = lambda epoch, batch, logs: saves.append(number)  # type: ignore[method-assign]
    schedule, expected, number = SaveSchedule(4), [], 0
    for epoch in range(3):
        checkpoint.on_epoch_begin(epoch)
        for batch in range(steps - 1, 9, steps):
            number += 1
            checkpoint.on_train_batch_end(batch)
            schedule = schedule.after(batch)
            expected += [number] if schedule.saves else []
    assert saves == expected != []


def test_optimizers_are_found_in_public_attributes_in_the_order_of_their_names() -> None:
    first, second, third = (hvd.DistributedOptimizer(keras.optimizers.SGD()) for _ in range(3))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    assert training_of(model) is None
    model.compile("sgd", "mse")
    model.nested, model.one = {"a": [keras.optimizers.LossScaleOptimizer(third)]}, second
    model._hidden = first
    found = training_of(model)
    assert isinstance(found, DistributedTraining)
    assert found.reducers == [second._mpistrat.reducer, third._mpistrat.reducer]
    assert found.undistributed == "", "as in a GAN that leaves the optimizer of compile() to Keras"
    model.optimizer.iterations.assign(1)
    assert found.undistributed.endswith(f" without hvd.DistributedOptimizer: {model.optimizer.name} (SGD).")
    model.compile(third, "mse")
    found = training_of(model)
    assert isinstance(found, DistributedTraining)
    assert found.reducers == [third._mpistrat.reducer, second._mpistrat.reducer]


def test_variables_that_are_trained_in_another_process_set_are_not_shared() -> None:
    here, there = keras.Variable([0.0]), keras.Variable([0.0])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    model.other = hvd.DistributedOptimizer(keras.optimizers.SGD(), process_set=hvd.ProcessSet([0]))
    model.optimizer.build([here])
    model.other.build([there])
    found = training_of(model)
    assert isinstance(found, DistributedTraining)
    assert [v is here for v in found.shared([here, there])] == [True]
    assert found.parts == [model.optimizer]


NOTHING = bytes(8)
A, B, C = (letter * 8 for letter in (b"a", b"b", b"c"))


@pytest.mark.parametrize(("digests", "expected"), [
    ([[A, B, C], [B, B, C]], []),  # The first digest is that of the gradients.
    ([[A, B, C], [A, B, A]], [1]),
    ([[A, B, C], [A, C, A], [A, B, C]], [0, 1]),
    ([[A], [A]], []),  # The weights were not read.
    ([[A, B], [A, B, C]], []),  # Another number of variables, which the reduction itself reports.
    ([], [])])
def test_variables_are_compared_by_their_digests(digests: list[list[bytes]], expected: list[int]) -> None:
    assert differing(digests) == expected


@pytest.mark.parametrize(("received", "expected"), [
    ([[[A, B], [A, B]], [[B], [B]]], True),
    ([[[A, B], [A, B]], [[B], [B]], [[C], [A]]], False),
    ([[[A, B], [A, B]]], False),  # One step may be chance.
    ([[[A, B], [A, B]], []], False),
    ([[[NOTHING, B], [NOTHING, B]], [[A], [A]]], False),
    # Gradients of different weights say nothing of the data.
    ([[[A, B], [B, C]], [[A, B], [A, B]], [[C], [C]]], True),
    ([[[A, B], [A, C]], [[A, B], [A, B]]], False),
    ([], False)])
def test_equal_gradients_of_equal_weights_mean_equal_data(received: list[list[list[bytes]]], expected: bool) -> None:
    assert is_same_data(received) is expected


def test_gathered_rows_are_those_of_the_ranks_in_their_order() -> None:
    rows = [(1).to_bytes(4, "little") + A, (0).to_bytes(4, "little") + B, (1).to_bytes(4, "little") + C]
    assert by_rank(np.frombuffer(b"".join(rows), np.uint8).reshape(3, -1)) == [[B], [A, C]]


def test_the_error_names_the_first_variable_the_ranks_and_what_to_write() -> None:
    text = describe_weights(["kernel", "bias", "scale"], [[A, A, A, A], [A, A, B, A], [B, A, A, C]])
    assert text.startswith("the ranks train different weights: the values of bias differ between ranks [0, 2] and "
                           "[1]. The same holds for 1 more of 3 variables. Broadcast the weights before training: ")
    assert "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks" in text
    assert "hvd.broadcast_variables(model.weights, root_rank=0)" in text


def test_the_error_of_many_ranks_is_not_long() -> None:
    text = describe_weights(["kernel"], [[A, rank.to_bytes(8, "little")] for rank in range(1000)])
    assert "differ between ranks [0], [1], [2], [3], [4], [5] and 994 more groups. Broadcast" in text
