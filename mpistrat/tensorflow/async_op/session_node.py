"""A collective in the graph of a session: one asynchronous operation, on the CPU here, whose kernel is Python.

The nodes of functions (graph/cpu.py) cannot be used: a session has its own devices and resources, and finds neither the
token nor the queues, and a graph that is not a function cannot capture eager tensors. The operation needs none of them.
It blocks no thread until other ranks are ready, and it allocates its results when it knows their sizes.

Ranks match the collectives only by name. A session runs any part of a graph, so a chain in program order would run
collectives that no fetch needs. A name gets a number when the graph is built, and contains the name of the tensor, as
in Horovod. So ranks that build other collectives, or other graphs before, wait for each other, and are told so. The
name of a collective that one run executes several times has a suffix, see submission.Executions.

Calls of Session.run are observed, as bridge/calls.py observes calls of functions. A run executes the part of the graph
that its fetches need. The collectives of that part learn the thread, and whether the run has failed. Then the other
ranks get an error that names this rank; otherwise collectives of different steps would be matched. TensorFlow has no
hook for runs. `watch` replaces BaseSession._do_run, which run and partial_run call, and make_callable:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/client/session.py#L1359
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ...core.errors import InvalidRequestError
from ..bridge import names
from ..bridge.calls import CallSite, observed_call, sites_among
from ..bridge.private_names import BaseSession
from ..bridge.program_order import HOST, current_execution
from ..bridge.python_op import array_at
from ..xla import context as xla
from . import kernel
from .submission import AsyncCallSite, Executions, MakeRequest, Observer, call_number


def run(name: str, make_request: MakeRequest, tensors: Sequence[tf.Tensor], shapes: Sequence[tf.TensorShape],
        process_set: int, observer: Observer | None) -> list[tf.Tensor]:
    """Make the node of one collective in a graph of a session, as graph.cpu.run. Collective when the node runs.

    Raises InvalidRequestError: XLA compiles the function with the collective, or TensorFlow has no such operation.
    """
    if xla.is_compiled():
        raise InvalidRequestError(f"{name}: XLA cannot compile a collective in a graph of a session. Leave jit_compile "
                                  "out of the function.")
    if reason := kernel.why_not():
        raise InvalidRequestError(f"{name}: a session cannot run collectives: {reason}. Put the step into a "
                                  "tf.function.")
    if names.is_made(name):
        name = f"{name} of {tensors[0].op.name}" if tensors else name
    past = number_of_execution()
    site = _SessionCallSite(name, process_set, make_request, tensors, observer, 1 + len(past))
    with tf.device(HOST):
        results = kernel.node(site, tensors, past)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    site.belongs_to(results[0].op)
    watch()
    return results


def number_of_execution() -> list[tf.Tensor]:
    """Inside a function: the number of this call, the first input of a collective's node. Elsewhere: [].

    The gradient of a function has the number of that function's call.
    """
    execution = current_execution.get()
    if execution is not None and execution.is_past:
        return [execution.number]
    number = call_number()
    if execution is not None and execution.number is None:
        execution.number = number
    return [] if number is None else [number]


class _SessionCallSite(AsyncCallSite):
    """The target of the node of one collective."""

    def __init__(self, name: str, process_set: int, make_request: MakeRequest, tensors: Sequence[tf.Tensor],
                 observer: Observer | None, first: int):
        super().__init__(name, process_set, make_request, None, observer, Executions(), tensors, first)
        self._kinds = [tensor.dtype.as_datatype_enum for tensor in tensors]

    def compute(self, call: kernel.Call) -> None:
        addresses, shapes, _ = call.exchange(self._first, self._dims, allocates=False)
        self.submit(call, list(map(array_at, addresses, shapes, self._dtypes)), kinds=self._kinds)


# -- runs --------------------------------------------------------------------------------------------------------------

Sites = tuple[CallSite, ...]

_known: "weakref.WeakKeyDictionary[tf.Graph, dict[frozenset[str], Sites]]" = weakref.WeakKeyDictionary()


@functools.cache
def watch() -> None:
    """Begin to observe the runs of all sessions. Local; a second call does nothing."""
    BaseSession._do_run = _observed_run(BaseSession._do_run)
    BaseSession.make_callable = _observed_callables(BaseSession.make_callable)


def _observed_run(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def observed(session: tf.compat.v1.Session, handle: object, targets: Sequence[tf.Operation],
                 fetches: Sequence[tf.Tensor], *rest: object) -> Any:
        sites = sites_of(session.graph, [*targets, *(fetch.op for fetch in fetches)])
        if not sites:
            return run(session, handle, targets, fetches, *rest)
        for site in sites:
            site.before_run(session)
        return observed_call(sites, run, session, handle, targets, fetches, *rest)
    return observed


def _observed_callables(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def observed(session: tf.compat.v1.Session, fetches: object, feed_list: object = None,
                 *rest: object, **named: object) -> Callable[..., Any]:
        made: Callable[..., Any] = make(session, fetches, feed_list, *rest, **named)
        if feed_list is not None:
            return made  # It calls run.
        elements = [session.graph.as_graph_element(each, allow_tensor=True, allow_operation=True)
                    for each in tf.nest.flatten(fetches, expand_composites=True)]
        sites = sites_of(session.graph, [getattr(each, "op", each) for each in elements])
        return functools.partial(observed_call, sites, made) if sites else made
    return observed


def sites_of(graph: tf.Graph, fetched: Iterable[tf.Operation]) -> Sites:
    """The sites in the part of a session's graph that these operations need, with the functions that it calls. Local.

    Feeds may make a part of the graph unnecessary. This is not considered.
    """
    operations = {operation.name: operation for operation in fetched}
    known, key = _known.setdefault(graph, {}), frozenset(operations)
    if key not in known:
        known[key] = _found(graph, list(operations.values()))
    return known[key]


def _found(graph: tf.Graph, todo: list[tf.Operation]) -> Sites:
    seen, nodes = set(todo), []
    while todo:
        operation = todo.pop()
        if operation.type == kernel.NAME or any(attribute.type in ("func", "list(func)")
                                         for attribute in operation.op_def.attr):
            nodes.append(operation.node_def)
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        todo += [each for each in before if each not in seen]
        seen.update(before)

    def nodes_of(name: str) -> Iterable[tf.compat.v1.NodeDef]:
        function = graph._get_function(name)
        # A Defun of TensorFlow 1 has no cached definition.
        return () if function is None else getattr(function, "cached_definition", function.definition).node_def

    return sites_among(nodes, nodes_of)
