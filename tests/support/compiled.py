"""Scripts that XLA compiles though they do not say so: each model, and each tf.function of theirs."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
import tensorflow as tf


@contextlib.contextmanager
def compiled_by_xla() -> Iterator[None]:
    """A context in which jit_compile is True where a script leaves it out, unless it runs a model eagerly."""
    compile, function = keras.Model.compile, tf.function

    def compile_model(self: keras.Model, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(compile).bind(self, *args, **kwargs)
        given.apply_defaults()
        if given.arguments["jit_compile"] == "auto" and not given.arguments["run_eagerly"]:
            given.arguments["jit_compile"] = True
        compile(*given.args, **given.kwargs)

    def compile_function(func: Callable | None = None, **options: Any) -> Any:
        if func is None:
            return functools.partial(compile_function, **options)
        return function(func, **({"jit_compile": True} if func.__module__ == "__main__" else {}), **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.Model, "compile", compile_model)
        patch.setattr(tf, "function", compile_function)
        yield
