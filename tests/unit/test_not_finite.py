"""FiniteWatch: which rank has the first Inf or NaN in its gradients."""

import numpy as np
import pytest

from mpistrat.core.handle import Entry, Handle
from mpistrat.core.request import Average, ScaledOp, TensorSpec, allreduce_request
from mpistrat.engine.not_finite import _CERTAIN, FiniteWatch

SHAPES = ((4, 3), (3,), (0, 2), (), (50,))
LABELS = tuple(f"layer{number}" for number in range(len(SHAPES)))
WEIGHTS = [np.ones((2, 2), np.float32), np.array(1, np.int64)]
LOST = [*WEIGHTS, np.array([0.0, np.nan])]


def entry(*bad: int, is_joined: bool = False, value: float = np.nan, labels: tuple[str, ...] = LABELS) -> Entry:
    """What a rank gives: tensors, of which some have one bad value each."""
    tensors = [np.ones(shape, np.float32) for shape in SHAPES]
    for number in bad:
        tensors[number].reshape(-1)[-1] = value
    specs = tuple(TensorSpec("float32", shape) for shape in SHAPES)
    arrays = [tensors[0], np.concatenate([t.reshape(-1) for t in tensors[1:]])] if is_joined else tensors
    layout = ((0,), (1, 2, 3, 4)) if is_joined else ()
    return Entry(allreduce_request("a", specs, ScaledOp(Average), labels, layout), arrays, Handle("a"))


def averaged(its: Entry, value: float = np.nan) -> list[np.ndarray]:
    return [np.full_like(array, value) for array in its.arrays]


@pytest.mark.parametrize("is_joined", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_tensors_of_the_first_rank_are_named_when_the_weights_are_lost(
        is_joined: bool, value: float, caplog: pytest.LogCaptureFixture) -> None:
    watch, own = FiniteWatch(3), entry(1, 4, is_joined=is_joined, value=value)
    watch.look(entry(is_joined=is_joined), averaged(own, 1.0))
    for _ in range(2):
        watch.look(own, averaged(own, value))
    watch.conclude(LOST)
    assert "rank 3 was the first with Inf or NaN in its gradients, 2 steps ago: in those of layer1, layer4 (5 tensors" \
        in caplog.text
    watch.conclude(LOST)
    assert len(caplog.records) == 1 and watch.is_done


def test_the_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = FiniteWatch(0)
    watch.look(entry(), averaged(entry()))
    for _ in range(_CERTAIN):  # Their gradients are NaN a step later.
        watch.look(entry(0, 1, 3, 4), averaged(entry()))
    assert watch.is_done and not caplog.records


def test_a_scale_of_the_loss_that_is_found_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch = FiniteWatch(0)
    for _ in range(_CERTAIN - 1):
        watch.look(entry(0), averaged(entry()))
    watch.conclude(WEIGHTS)  # An epoch ends.
    for result in (np.inf, 1.0, np.inf):
        watch.look(entry(0), averaged(entry(), result))
    assert not caplog.records and not watch.is_done


def test_without_a_look_at_the_weights_many_steps_decide(caplog: pytest.LogCaptureFixture) -> None:
    watch = FiniteWatch(0)
    for number in range(_CERTAIN):
        watch.look(entry(4), averaged(entry()))
        watch.look(entry(labels=("another",) * len(SHAPES)), averaged(entry(), np.nan if number else 1.0))
    assert f"{_CERTAIN} steps ago: in those of layer4 (5 tensors were reduced together)" in caplog.text


def test_one_value_of_many_tensors_in_the_last_layer_is_enough() -> None:
    watch, own = FiniteWatch(0), entry()
    watch.look(own, [*averaged(own, 1.0)[:-1], np.full(50, np.nan)])
    watch.conclude(LOST)
    assert watch.is_done
