"""Converts errors of mpistrat to errors of TensorFlow, because scripts for Horovod catch those. Thread-safe."""

from collections.abc import Callable

import tensorflow as tf

from ...core.errors import (
    DuplicateNameError,
    EngineError,
    InvalidRequestError,
    MismatchError,
    MpistratError,
    NotInitializedError,
)

_TF_ERRORS: list[tuple[type[MpistratError], type[tf.errors.OpError]]] = [
    (MismatchError, tf.errors.FailedPreconditionError),
    (NotInitializedError, tf.errors.FailedPreconditionError),
    (DuplicateNameError, tf.errors.InvalidArgumentError),
    (InvalidRequestError, tf.errors.InvalidArgumentError),
    (EngineError, tf.errors.UnknownError),
]
_merged: dict[type[MpistratError], type[Exception]] = {}


def as_tf_error(error: MpistratError) -> Exception:
    """Return `error` as an instance of two classes: its own, and the class of tf.errors that Horovod would raise.

    A traceback shows the name of its own class, by which `mpistrat run` recognizes errors of mpistrat.
    """
    theirs = next((theirs for ours, theirs in _TF_ERRORS if isinstance(error, ours)), None)
    if theirs is None:
        return error
    kind = _merged.get(type(error))
    if kind is None:
        kind = _merged[type(error)] = _merged_class(type(error), theirs)
    return kind(error)


def described(error: BaseException) -> tuple[str, int]:
    """Return the text of an error, and the error code for which TensorFlow raises the same class as Horovod."""
    shown = as_tf_error(error) if isinstance(error, MpistratError) else error
    return f"{type(error).__name__}: {error}", getattr(shown, "error_code", tf.errors.UNKNOWN)


def _merged_class(ours: type[MpistratError], theirs: type[tf.errors.OpError]) -> type[Exception]:
    def initialise(self: tf.errors.OpError, error: MpistratError) -> None:
        theirs.__init__(self, None, None, str(error))
        self.args = error.args  # which TensorFlow empties, and repr() prints

    def reduced(self: tf.errors.OpError) -> tuple[Callable[[MpistratError], Exception], tuple[MpistratError]]:
        return as_tf_error, (ours(*self.args),)  # Pickle would find the class without TensorFlow's by this name.

    return type(ours.__name__, (ours, theirs),
                {"__init__": initialise, "__reduce__": reduced, "__module__": ours.__module__})
