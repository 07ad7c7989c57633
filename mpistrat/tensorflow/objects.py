"""Names of horovod.tensorflow that have a session of TensorFlow 1: it is ignored, or they say what takes their place.

For users; the functions of objects are collective.
"""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ..api import ops as array_ops
from ..api.process_sets import ProcessSet, global_process_set

T = TypeVar("T")


def broadcast_object(obj: object = None, root_rank: int = 0, session: object = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """As mpistrat.broadcast_object. Collective. `session` is accepted for compatibility with Horovod, and ignored."""
    return array_ops.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(root_rank: int = 0, session: object = None, name: str | None = None,
                        process_set: ProcessSet = global_process_set) -> Callable[[object], Any]:
    """Return a function of one object that calls broadcast_object with these arguments. Local."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj: T, session: object = None, name: str | None = None,
                     process_set: ProcessSet = global_process_set) -> list[T]:
    """As mpistrat.allgather_object. Collective. `session` is accepted for compatibility with Horovod, and ignored."""
    return array_ops.allgather_object(obj, name, process_set)


_TEXT = ("{name} is for TensorFlow 1's sessions, which mpistrat does not support. Call broadcast_variables(variables, "
         "root_rank) after the variables have been created, or pass callbacks.BroadcastGlobalVariablesCallback("
         "root_rank) of mpistrat.keras to fit().")


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: there is no collection of all variables in TensorFlow 2. Use broadcast_variables. Local."""
    raise RuntimeError(_TEXT.format(name="broadcast_global_variables()"))


class BroadcastGlobalVariablesHook:
    """Raises RuntimeError when it is made: TensorFlow 2 has no sessions to hook into.

    Use broadcast_variables, or the callback BroadcastGlobalVariablesCallback of mpistrat.keras.
    """

    def __init__(self, root_rank: int, device: str = "", **_: object):
        raise RuntimeError(_TEXT.format(name="BroadcastGlobalVariablesHook"))
