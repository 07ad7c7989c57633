"""What the nodes of a graph submit: a collective with its arrays, under a name for this execution."""

import dataclasses
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from ...api import runtime
from ...api.group import Group
from ...core.request import Request
from ...gpu.arrays import GpuTensors
from ..bridge.calls import CallSite
from ..bridge.execution_ids import Execution
from .session_executions import Executions

if TYPE_CHECKING:
    from .kernel import Call

# This rank's tensors, on the host or on its GPU.
Submitted = Sequence[np.ndarray] | GpuTensors
# Makes the request from this rank's tensors. Equal for equal shapes.
MakeRequest = Callable[[Submitted], Request]
# Called when a collective of a graph runs, before its arrays are submitted: with the arrays of this rank, and with the
# part of names that stands for the thread that runs the graph. Returns whether it wants to be called again. An
# exception becomes the error of the graph. It must not refer to the graph, and must not change the arrays or keep them.
Observer = Callable[[Sequence[np.ndarray], str], bool]

_SHAPE = attrgetter("shape")


class Submission(NamedTuple):
    """A collective that is ready to be submitted."""

    group: Group
    request: Request
    arrays: Submitted
    number: int  # The number of the execution of the graph; 0 if it is not needed.


class CollectiveCallSite(CallSite):
    """A collective in a graph: makes the submission of each execution. Several executions may be in flight.

    Args:
        name, process_set: As for CallSite.
        make_request: Makes the request. It must not refer to the graph.
        execution: The execution that the collective belongs to; None: its number is not needed.
        observer: Called before the collective is submitted.
        in_session: Distinguishes the executions in the graph of a session; None: not in the graph of a session.
    """

    def __init__(self, name: str, process_set: int, make_request: MakeRequest,
                 execution: Execution | None, observer: Observer | None, in_session: Executions | None = None):
        super().__init__(name, process_set)
        self._in_session, self.is_in_order = in_session, in_session is None
        self._make_request, self._observer = make_request, observer
        self._has_past = execution is not None and execution.is_past
        self._counts = execution is not None and execution.number is None
        self._latest: tuple[list[tuple[int, ...]], str, Request] | None = None

    def all_names(self) -> set[str]:
        own = self.thread + self.name
        return {own, *(f"{own}#{suffix}" for suffix in self._in_session.seen)} if self._in_session else {own}

    def host_submission(self, inputs: Sequence[np.ndarray]) -> Submission:
        """As `submission`, for inputs on the host: the arrays, and in a gradient the number of the execution."""
        arrays = list(map(np.asarray, inputs))  # TensorFlow passes scalars of numpy too.
        return self.submission(arrays, int(arrays.pop()) if self._has_past else None)

    def before_run(self, session: object) -> None:
        prepare = getattr(self._observer, "before_run", None)
        if prepare is not None:
            prepare(session)

    def session_submission(self, arrays: Submitted, call: "Call",
                           fetched: Callable[[], Sequence[np.ndarray]] | None = None) -> Submission:
        """As `submission`, for a call in a graph of a session."""
        assert self._in_session is not None
        return self.submission(arrays, self._in_session.suffix(call) or None, fetched)

    def submission(self, arrays: Submitted, past: int | str | None,
                   fetched: Callable[[], Sequence[np.ndarray]] | None = None) -> Submission:
        """Return the collective to submit.

        Args:
            arrays: This rank's tensors.
            past: In a gradient, the number of its function's execution; in a session, the suffix of this execution.
            fetched: Returns copies of the tensors on the host; None: `arrays` are on the host.
        """
        thread = self.thread
        if self._observer is not None:
            on_host = fetched() if fetched is not None else cast("Sequence[np.ndarray]", arrays)
            if not self._observer(on_host, thread):
                self._observer = None
        shapes = list(arrays.shapes if isinstance(arrays, GpuTensors) else map(_SHAPE, arrays))
        latest = self._latest
        if latest is None or latest[0] != shapes or latest[1] != thread:
            request = dataclasses.replace(self._make_request(arrays), name=thread + self.name, in_graph=True)
            latest = self._latest = shapes, thread, request
        request, group = latest[2], runtime.group_of(self.name, self.process_set)
        number = group.next_number(("execution", request.name)) if self._counts else 0
        if past is not None:
            request = dataclasses.replace(request, name=f"{request.name}#{past}")
        return Submission(group, request, arrays, number)
