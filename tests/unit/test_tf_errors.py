"""Errors that are of mpistrat's class and of TensorFlow's: their names, and what pickle makes of them."""

import pickle

import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from mpistrat.core.errors import ClusterError, EngineError, MismatchError, MpistratError, ShutdownError  # noqa: E402
from mpistrat.process.error_text import split_message  # noqa: E402
from mpistrat.tensorflow.bridge.tf_errors import as_tf_error  # noqa: E402

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
