"""Checks of the arguments of functions that a script calls seldom, such as constructors. Local."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from ...core.errors import InvalidRequestError
from ...core.request import ReduceOp

_Function = TypeVar("_Function", bound=Callable[..., Any])
# By annotation: the values that are accepted, and a method that they have, also if they are numbers of numpy.
_KINDS: dict[Any, tuple[str, str]] = {
    bool: ("True or False", "__bool__"), int: ("an integer", "__index__"), float: ("a number", "__float__"),
    ReduceOp: ("an operation such as hvd.Sum, without quotes", "__index__")}
# By name, in all functions: the smallest value of an argument.
_LEAST = {"backward_passes_per_step": 1, "batches_per_commit": 1, "commit_every": 1, "every": 1, "steps_per_epoch": 0,
          "warmup": 0, "warmup_epochs": 0}
_RANK_EACH = "each rank has one device. Start one rank for each device: mpistrat run -np <devices>"
# By name: arguments of TensorFlow's strategies that no function here has, with the reason.
_LEFT_OUT = {"cluster_resolver": "the ranks come from mpirun", "cross_device_ops": "MPI or NCCL reduces the tensors",
             **dict.fromkeys(["devices", "compute_devices", "parameter_device"], _RANK_EACH)}


def checked(function: _Function) -> _Function:
    """Return `function` with checks of its arguments. They take microseconds, too long for a collective in each step.

    An unknown argument is a TypeError that suggests the nearest name. An argument with the annotation bool, int, float
    or ReduceOp, or with one of them or None, is an InvalidRequestError if its value is of another kind or too small.
    """
    parameters = inspect.signature(function).parameters
    is_open = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    kinds = {name: (*_KINDS[kind], each.annotation != kind or kind is ReduceOp)  # op=None is the default operation.
             for name, each in parameters.items() for kind in _KINDS if each.annotation in (kind, kind | None)}

    @wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        title = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        for name, value in (*zip(parameters, args, strict=False), *arguments.items()):
            if name not in parameters and not is_open:
                hint = f". Leave it out: {_LEFT_OUT[name]}." if name in _LEFT_OUT else "".join(
                    f". Did you mean {each}?" for each in difflib.get_close_matches(name, parameters, 1))
                raise TypeError(f"{title}() got an unexpected keyword argument {name!r}{hint}")
            text, method, may_be_none = kinds.get(name, ("", "", True))
            if text and not (may_be_none if value is None else hasattr(value, method)):
                raise InvalidRequestError(f"{title}({name}=) must be {text}. Received: {value!r}")
            if name in _LEAST and value is not None and value < _LEAST[name]:
                raise InvalidRequestError(f"{title}({name}=) must be at least {_LEAST[name]}. Received: {value!r}")
        return function(*args, **arguments)

    return cast("_Function", call)
