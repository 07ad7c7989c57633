"""Observes calls of Session.run: their thread and their end, as bridge/calls.py does for calls of functions.

A run executes the part of the graph that its fetches need. The collectives of that part learn the thread, and whether
the run has failed. Then the other ranks get an error that names this rank; otherwise collectives of different steps
would be matched. TensorFlow has no hook for runs. `watch` replaces BaseSession._do_run, which run and partial_run call,
and make_callable:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/client/session.py#L1359
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from ..bridge.calls import CallSite, observed_call, sites_among
from ..bridge.private_names import BaseSession
from .kernel import NAME

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
    known = _known.setdefault(graph, {})
    key = frozenset(operations)
    if key not in known:
        known[key] = _found(graph, list(operations.values()))
    return known[key]


def _found(graph: tf.Graph, todo: list[tf.Operation]) -> Sites:
    seen, nodes = set(todo), []
    while todo:
        operation = todo.pop()
        if operation.type == NAME or any(attribute.type in ("func", "list(func)")
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
