"""How large the buckets of gradients are, by where the ranks are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from mpistrat.core.settings import Settings
from mpistrat.tensorflow.graph import buckets

MIB = 2**20


@pytest.mark.parametrize("spans_hosts, device, asked, disabled, expected", [
    (False, None, 0, "none", (16 * MIB, 16 * MIB)), (True, None, 0, "none", (4 * MIB, MIB)),
    (True, None, 0, "small_buckets", (16 * MIB, 16 * MIB)), (True, "GPU:0", 0, "none", (32 * MIB, 32 * MIB)),
    (True, None, 5, "none", (5, 5)), (False, "GPU:0", 5, "none", (5, 5))])
def test_several_hosts_have_small_buckets_unless_a_size_is_asked_for(
        monkeypatch: pytest.MonkeyPatch, spans_hosts: bool, device: str | None, asked: int, disabled: str,
        expected: tuple[int, int]) -> None:
    job = SimpleNamespace(spans_hosts=spans_hosts, settings=Settings(disable=disabled))
    monkeypatch.setattr(buckets.runtime, "current", lambda: job)
    assert buckets.limits_of(asked, device) == expected


def test_the_first_bucket_is_the_smallest() -> None:
    tensors = [(tf.float32, tf.TensorShape([MIB // 8]))] * 20  # of half a MiB
    made = buckets.plan(tensors, 4 * MIB, MIB)
    assert [len(bucket.single) for bucket in made] == [2, 8, 8, 2]
    assert made[0].single == [19, 18] and made[-1].single == [1, 0]


@pytest.mark.parametrize("calls, expected", [((0, 1, 2), [0, 1, 2]), ((2, 1, 0), [2, 1, 0]), ((1, 0, 2), [0, 2, 1])])
@pytest.mark.parametrize("clipped", [False, True])
def test_buckets_are_submitted_as_the_backward_pass_computes_them(calls: tuple[int, ...], expected: list[int],
                                                                  clipped: bool) -> None:
    weights = [tf.Variable([[1.0]]) for _ in calls]
    orders = []

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            values = tf.ones([1, 1])
            for place in calls:
                values = tf.nn.relu(values @ weights[place])
        gradients = [tf.clip_by_norm(each, 1.0) if clipped else each for each in tape.gradient(values, weights)]
        orders.append(buckets.submission_order([[gradient] for gradient in reversed(gradients)]))

    step.get_concrete_function()
    assert orders == [expected]
