"""Private functions of TensorFlow: whether they accept mpistrat's calls, and those of datasets."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import tensorflow as tf

from ..core.errors import MissingDependencyError


class Call(NamedTuple):
    """A call of a private function: the number of positional arguments (`self` included) and the keywords."""

    function: Callable[..., object]
    positional: int
    keywords: tuple[str, ...] = ()


def rejected(calls: Iterable[Call]) -> list[str]:
    """A description of each call that the function's signature does not accept."""
    found = []
    for function, positional, keywords in calls:
        signature = inspect.signature(function)
        try:
            signature.bind(*range(positional), **dict.fromkeys(keywords))
        except TypeError as error:
            found.append(f"{function.__qualname__}{signature} has changed ({error})")
    return found


def unsupported(user: str, what: object, advice: str = "") -> MissingDependencyError:
    """The error of `user`, a part of mpistrat, for something that this version of TensorFlow lacks."""
    return MissingDependencyError(f"{user} does not support TensorFlow {tf.__version__}: {what}. It was run with "
                                  f"TensorFlow 2.16.1 to 2.21.{advice}")


def functions_of(dataset: tf.data.Dataset) -> list[Any]:
    """The functions of a dataset, as TensorFlow wraps them."""
    return list(dataset._functions())


def inputs_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads."""
    return list(dataset._inputs())
