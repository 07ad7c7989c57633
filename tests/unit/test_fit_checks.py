"""What the ranks may differ in when they train with fit, and what they may not. Decisions only, in one process."""

from dataclasses import replace

import pytest

keras = pytest.importorskip("keras")
hvd = pytest.importorskip("mpistrat.keras")

from mpistrat.keras.fit_checks import (  # noqa: E402
    Begin,
    Progress,
    means_of,
    problem_at_begin,
    problem_between_epochs,
    readers,
)

BEGIN = Begin(steps=8, epochs=3, weights=4, collective=(), readers=(), averages_statistics=True)
BROADCAST = ("BroadcastGlobalVariablesCallback",)


@pytest.mark.parametrize("other", [
    BEGIN, replace(BEGIN, steps=None), replace(BEGIN, epochs=None), replace(BEGIN, readers=("EarlyStopping",)),
    replace(BEGIN, weights=0)], ids=["same", "unknown steps", "unknown epochs", "readers", "weights come later"])
def test_ranks_may_begin_like_this(other: Begin) -> None:
    assert problem_at_begin([BEGIN, other, BEGIN]) == ""


@pytest.mark.parametrize(("begin", "other", "texts"), [
    (BEGIN, replace(BEGIN, steps=9),
     ["different numbers of steps per epoch: 8 on ranks [0, 2]; 9 on ranks [1].", "x, y = hvd.shard(x, y)",
      "dataset.take(8)", "steps_per_epoch=8"]),
    (BEGIN, replace(BEGIN, epochs=4), ["different numbers of epochs: 3 on ranks [0, 2]; 4 on ranks [1]."]),
    (BEGIN, replace(BEGIN, collective=BROADCAST), ["only ranks [1] have a BroadcastGlobalVariablesCallback."]),
    (replace(BEGIN, collective=("MetricAverageCallback",)), BEGIN, ["only ranks [0, 2] have a MetricAverageCallback."]),
    (replace(BEGIN, collective=BROADCAST), replace(BEGIN, collective=BROADCAST, weights=0),
     ["different numbers of weights: 4 on ranks [0, 2]; 0 on ranks [1]."]),
    (BEGIN, replace(BEGIN, averages_statistics=False),
     ["DistributedOptimizer(average_statistics=): True on ranks [0, 2]; False on ranks [1]."])],
    ids=["steps", "epochs", "broadcast", "average", "weights", "statistics"])
def test_ranks_may_not_begin_like_this(begin: Begin, other: Begin, texts: list[str]) -> None:
    problem = problem_at_begin([begin, other, begin])
    assert all(text in problem for text in texts), problem


def test_unknown_numbers_of_steps_are_not_compared() -> None:
    problem = problem_at_begin([BEGIN, replace(BEGIN, steps=None), replace(BEGIN, steps=5)])
    assert "8 on ranks [0]; unknown on ranks [1]; 5 on ranks [2]" in problem


@pytest.mark.parametrize("states", [
    [BEGIN, replace(BEGIN, readers=("EarlyStopping",))], [Progress(2), Progress(2)],
    [Progress(2, True, " (stopped by EarlyStopping)"), Progress(2, True)]], ids=["begin", "go on", "end"])
def test_ranks_are_together(states: list) -> None:
    assert problem_between_epochs(states) == ""


@pytest.mark.parametrize(("states", "said", "advice"), [
    ([Progress(2), Progress(2, True, " (stopped by EarlyStopping)"), Progress(2)],
     "ranks [0, 2] go on to epoch 3; ranks [1] ended training after epoch 2 (stopped by EarlyStopping).",
     "A rank that stops alone leaves the others without its gradients. Give all ranks the same callbacks"),
    ([Progress(2), Progress(5)], "ranks [0] go on to epoch 3; ranks [1] go on to epoch 6.", "the same epochs="),
    ([BEGIN, Progress(1)], "ranks [0] begin to train; ranks [1] go on to epoch 2.", "the same epochs=")],
    ids=["one stops", "other epochs", "one begins anew"])
def test_ranks_that_are_not_together_are_named(states: list, said: str, advice: str) -> None:
    problem = problem_between_epochs(states)
    assert said in problem
    assert advice in problem


def test_callbacks_that_decide_by_metrics_need_averaged_ones() -> None:
    early = keras.callbacks.EarlyStopping()
    plateau, average = keras.callbacks.ReduceLROnPlateau(), hvd.callbacks.MetricAverageCallback()
    best, every = (keras.callbacks.ModelCheckpoint("a.keras", save_best_only=only) for only in (True, False))
    assert readers([early, plateau, best, every]) == ["EarlyStopping", "ReduceLROnPlateau", "ModelCheckpoint"]
    assert readers([every, plateau, average, early]) == ["ReduceLROnPlateau"]
    assert readers([average, early, plateau, best]) == []
    assert readers([]) == []


def test_metrics_that_all_ranks_have_are_averaged() -> None:
    assert means_of([{"loss": 1.0, "val": 3.0}, {"loss": 2.0}, {"loss": 6.0, "x": 1.0}]) == \
        ({"loss": 3.0}, {"val": [0], "x": [2]})
