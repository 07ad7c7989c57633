"""A collective on CPU tensors in the graph of a tf.compat.v1 session: one asynchronous operation of async_op/kernel.py.

The three nodes that a collective has in a tf.function (graph/cpu.py) do not work in a session. They use variables and
queues of the eager context, which a session cannot access, and its graph cannot capture eager tensors. The operation
needs neither. It blocks no thread while other ranks are not ready, and allocates results when it knows their sizes.

Ranks match these collectives by name only. There is no chain in program order, because a session runs any part of a
graph, and with a chain it would run collectives that no fetch needs. A name contains the name of the tensor, as in
Horovod, and a number that is counted while the graph is built. So ranks that have built different graphs wait for each
other, and get an error. If one run executes a collective several times, each execution adds a suffix to the name, see
submission.Executions.

Each run of a session is observed, as calls of functions are in bridge/calls.py: the collectives that the fetches need
learn the calling thread, and whether the run has failed. After a failed run the other ranks get an error that names
this rank. Without the error, collectives of different steps would match. TensorFlow has no hook for runs. So `watch`
replaces two methods of BaseSession: make_callable, and _do_run, which run and partial_run call:
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
    """Add the node of one collective to a session's graph. Arguments as for graph.cpu.run. Collective when it runs.

    Raises InvalidRequestError: XLA would compile the collective, or this process cannot use the operation.
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
    """Return [the number of the current call of the traced function], an int64 tensor; [] outside of functions.

    In the gradient of a function, the number is that of the forward call. Only for graphs of sessions.
    """
    execution = current_execution.get()
    if execution is not None and execution.is_past:
        return [execution.number]
    number = call_number()
    if execution is not None and execution.number is None:
        execution.number = number
    return [] if number is None else [number]


class _SessionCallSite(AsyncCallSite):
    """The object that the node of one collective calls in Python."""

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
    """Return the CallSites of the collectives that a run may execute if it fetches these operations. Local.

    Nodes in called functions are included, and also nodes that a run skips because of its feeds.
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
