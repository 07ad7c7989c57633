"""What ranks disagree about, and rank lists, in words."""

from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.request import CollectiveType, ReduceOp, Request
from ..core.topology import rank_list


def describe_mismatch(by_request: dict[Request, set[int]]) -> str:
    """The sentence on what the ranks disagree about; checked in Horovod's order.

    Args:
        by_request: At least two different requests of one name, each with the ranks that submitted it.
    """
    first = next(iter(by_request))
    aspects: list[tuple[str, Callable[[Request], Any]]] = [
        ("kind of collective", lambda r: r.kind.value), ("number of tensors", lambda r: len(r.tensors))]
    for i in range(min(len(r.tensors) for r in by_request)):
        label = f" ({first.labels[i]})" if i < len(first.labels) else ""
        which = f" of tensor {i}{label}" if len(first.tensors) > 1 else label
        aspects += [(f"dtype{which}", partial(_dtype, i)), (f"shape{which}", partial(_shape, i))]
    aspects += [("prescale and postscale factors", lambda r: (r.prescale, r.postscale)),
                ("reduce operation", lambda r: ReduceOp(r.reduce_op).name.capitalize()),
                ("root rank", lambda r: r.root_rank),
                ("device", lambda r: r.device),
                ("compression", lambda r: r.wire or "none"),
                ("how the list is packed (an eager call and a tf.function differ in that)",
                 lambda r: r.layout or "one by one")]
    for what, get in aspects:
        values: dict[Any, set[int]] = {}
        for request, ranks in by_request.items():
            values.setdefault(get(request), set()).update(ranks)
        if len(values) > 1:
            said = "; ".join(f"{value} on ranks {rank_list(sorted(ranks))}" for value, ranks in
                             sorted(values.items(), key=lambda item: min(item[1])))
            return f"{first.name}: the ranks disagree on {what}: {said}."
    raise AssertionError("the requests are equal")


def describe_half_done(mismatch: str) -> str:
    """Why a mismatch in a graph ends the engines, in words.

    TensorFlow gives up the rest of the graph, on every rank at another point. What some ranks have submitted by then
    cannot be taken back, and would be reduced together with what the others submit the next time.
    """
    return (f"{mismatch} That was inside a tf.function, where the other collectives of the step cannot be taken back, "
            "so the engine has ended. To go on in the same process, call shutdown() and init() on every rank.")


def _dtype(index: int, request: Request) -> str:
    return request.tensors[index].dtype


def _shape(index: int, request: Request) -> str:
    shape = request.tensors[index].shape
    if request.kind is CollectiveType.ALLGATHER:
        return "(" + ", ".join(["any", *map(str, shape[1:])]) + ")"
    return str(shape)


