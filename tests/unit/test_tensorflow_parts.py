"""Parts of mpistrat.tensorflow: errors of both libraries, IdentitySet, tensors over memory of arrays, bucket sizes."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from mpistrat.core.errors import ClusterError, EngineError, MismatchError, MpistratError, ShutdownError
from mpistrat.core.memory import ALIGNMENT, aligned_empty
from mpistrat.core.settings import Settings
from mpistrat.process.error_text import split_message
from mpistrat.tensorflow.bridge.tf_errors import as_tf_error
from mpistrat.tensorflow.graph import buckets
from mpistrat.tensorflow.graph.cpu import to_array, to_tensor
from mpistrat.tensorflow.kerases import IdentitySet

each_class = pytest.mark.parametrize(("ours", "theirs"), [
    (ShutdownError, tf.errors.UnknownError), (EngineError, tf.errors.UnknownError),
    (MismatchError, tf.errors.FailedPreconditionError)])


@each_class
def test_an_error_is_of_both_classes_and_is_printed_as_ours(ours: type[MpistratError], theirs: type[Exception]) -> None:
    error = as_tf_error(ours("the text"))
    assert isinstance(error, ours) and isinstance(error, theirs)
    assert split_message(error)[1] == f"mpistrat.core.errors.{ours.__name__}: the text"
    assert repr(error) == f"{ours.__name__}('the text')"


@each_class
def test_pickle_makes_the_same_class_of_it(ours: type[MpistratError], theirs: type[Exception]) -> None:
    error = as_tf_error(ours("the text"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == "the text"


def test_an_error_that_horovod_does_not_have_is_left_as_it_is() -> None:
    error = ClusterError("the text")
    assert as_tf_error(error) is error


def test_it_compares_by_identity() -> None:
    first, second = [1], [1]
    members = IdentitySet([first])
    assert first in members and second not in members
    members.add(second)
    assert second in members


def test_what_is_made_later_does_not_take_the_place_of_a_member_that_nobody_else_has() -> None:
    members = IdentitySet()
    members.add(object())
    assert not any(object() in members for _ in range(1000))


@pytest.mark.parametrize("offset", [0, 4, 16])
def test_a_tensor_has_aligned_memory(offset: int) -> None:
    memory = aligned_empty(ALIGNMENT + 16)
    array = memory[offset:offset + 16].view(np.int32)
    array[:] = range(4)
    tensor = to_tensor(array)
    # An operation on memory that is not aligned may abort the process.
    assert to_array(tensor).ctypes.data % ALIGNMENT == 0
    assert (to_array(tensor).ctypes.data == array.ctypes.data) == (offset == 0)
    assert tensor[1:].numpy().tolist() == [1, 2, 3]


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
