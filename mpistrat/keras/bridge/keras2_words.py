"""Three spellings of Keras 2 in Horovod scripts, made valid in Keras 3 by `mpistrat run --as-horovod=keras2` only.

`compile(experimental_run_tf_function=...)` is ignored, `optimizer.variables()` is an attribute in Keras 3, and the
argument `lr` of optimizers is learning_rate in Keras 3. The change is for the whole process.
"""

import functools
import inspect
from typing import Any

import keras

from .patches import Function

_WORD = "experimental_run_tf_function"


class _Variables(list):
    """The variables of an optimizer, which Keras 2 returns from a call."""

    def __call__(self) -> "_Variables":
        return self


@functools.cache
def install() -> None:
    """Make Keras accept the three spellings. Local; a second call does nothing."""
    keras.Model.compile = _compile(keras.Model.compile)
    base = next(cls for cls in keras.optimizers.Optimizer.__mro__ if "variables" in vars(cls))
    variables: Function = vars(base)["variables"].fget
    base.variables = property(lambda self: _Variables(variables(self)))
    for cls in vars(keras.optimizers).values():
        if isinstance(cls, type) and issubclass(cls, keras.optimizers.Optimizer) and "__init__" in vars(cls):
            setattr(cls, "__init__", _with_lr(vars(cls)["__init__"]))  # noqa: B010 - mypy allows no assignment


def _compile(original: Function) -> Function:
    @functools.wraps(original)
    def compile_model(*args: object, **kwargs: object) -> Any:
        kwargs.pop(_WORD, None)
        return original(*args, **kwargs)

    known = inspect.signature(original)  # Code that binds arguments by the signature must find the word.
    word = inspect.Parameter(_WORD, inspect.Parameter.KEYWORD_ONLY, default=None)
    compile_model.__signature__ = known.replace(parameters=[*known.parameters.values(), word])  # type: ignore[attr-defined]
    return compile_model


def _with_lr(original: Function) -> Function:
    @functools.wraps(original)
    def initialise(self: keras.optimizers.Optimizer, *args: object, **kwargs: object) -> None:
        if "lr" in kwargs:
            kwargs["learning_rate"] = kwargs.pop("lr")
        original(self, *args, **kwargs)

    return initialise
