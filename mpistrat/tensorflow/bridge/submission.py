"""What the nodes of a graph on the host submit: a collective from arrays, under the name of this execution."""

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from ...api import runtime
from ...api.group import Group
from ...core.request import Request
from ...gpu.arrays import GpuInput
from . import executions
from .calls import CallSite
from .executions import Execution

# Makes the request from this rank's arrays, or GpuInputs if they are on a GPU. Equal for equal shapes.
MakeRequest = Callable[[Sequence[np.ndarray | GpuInput]], Request]
# Called when a collective of a graph runs, before its arrays are submitted: with the arrays of this rank, and with the
# part of names that stands for the thread that runs the graph. Returns whether it wants to be called again. What it
# raises becomes the error of the graph. It must not refer to the graph, and must not change the arrays or keep them.
Observer = Callable[[Sequence[np.ndarray], str], bool]

_SHAPE = attrgetter("shape")


@dataclasses.dataclass(frozen=True)
class Submission:
    """A collective that is ready to be submitted.

    Attributes:
        number: That of the execution of the graph, 0 if it is not needed.
    """

    group: Group
    request: Request
    arrays: Sequence[np.ndarray]
    number: int


class HostCallSite(CallSite):
    """A collective in a graph that gets its tensors on the host. Several executions may be in flight.

    Args:
        name: Identifies the collective on all ranks, without the thread.
        process_set: The id of the process set.
        make_request: Makes the request. It must not refer to the graph.
        execution: The execution that the collective belongs to.
        observer: Called before the collective is submitted.
    """

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, execution: Execution,
                 observer: Observer | None):
        super().__init__(name, process_set)
        self._make_request, self._observer = make_request, observer
        self._has_past, self._counts = execution.is_past, execution.number is None
        self._latest: tuple[list[tuple[int, ...]], str, Request] | None = None

    def submission(self, inputs: Sequence[np.ndarray]) -> Submission:
        """What to submit for these inputs: the arrays, and in a gradient the number of the execution it belongs to."""
        arrays = list(map(np.asarray, inputs))  # TensorFlow passes scalars of numpy too.
        past = int(arrays.pop()) if self._has_past else None
        if self._observer is not None and not self._observer(arrays, self.thread):
            self._observer = None
        shapes, name = list(map(_SHAPE, arrays)), self.thread + self.name
        if self._latest is None or self._latest[:2] != (shapes, name):
            self._latest = shapes, name, dataclasses.replace(self._make_request(arrays), name=name, in_graph=True)
        request, group = self._latest[2], runtime.group_of(self.name, self.process_set)
        number = group.next_number(("execution", name)) if self._counts else 0
        if past is not None:
            request = dataclasses.replace(request, name=name + executions.suffix(past))
        return Submission(group, request, arrays, number)
