"""Collectives on Python objects, with the arguments of horovod.tensorflow. For users; collective."""

from collections.abc import Callable
from typing import Any, TypeVar

from ..api import array_ops
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
