"""How large the buckets of gradients are, by where the ranks are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("tensorflow")

import tensorflow as tf

from mpistrat.core.request import ScaledOp, Sum
from mpistrat.tensorflow.bridge import buckets
from mpistrat.tensorflow.bridge.reduce_spec import ReduceSpec

MIB = 2**20


@pytest.mark.parametrize("spans_hosts, device, asked, expected", [
    (False, None, 0, (16 * MIB, 16 * MIB)), (True, None, 0, (4 * MIB, MIB)), (True, "GPU:0", 0, (32 * MIB, 32 * MIB)),
    (True, None, 5, (5, 5)), (False, "GPU:0", 5, (5, 5))])
def test_several_hosts_have_small_buckets_unless_a_size_is_asked_for(
        monkeypatch: pytest.MonkeyPatch, spans_hosts: bool, device: str | None, asked: int,
        expected: tuple[int, int]) -> None:
    monkeypatch.setattr(buckets.runtime, "current", lambda: SimpleNamespace(spans_hosts=spans_hosts))
    assert buckets.limits_of(ReduceSpec("g", ScaledOp(Sum), bucket_bytes=asked), device) == expected


def test_the_first_bucket_is_the_smallest() -> None:
    tensors = [(tf.float32, tf.TensorShape([MIB // 8]))] * 20  # of half a MiB
    made = buckets.plan(tensors, 4 * MIB, MIB)
    assert [len(bucket.single) for bucket in made] == [2, 8, 8, 2]
    assert made[0].single == [19, 18] and made[-1].single == [1, 0]
