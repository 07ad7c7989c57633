"""Observes calls of graphs from Python: which thread calls, and whether the call fails. Nodes cannot see either.

Each node that submits a collective has a `CallSite`. When Python calls a tf.function, all sites in the function learn
the calling thread, which is a part of the names that names.py makes. So two threads may run different functions of the
same name at the same time. Two threads that run one function at the same time get an error: its nodes have no order.

If the call ends in an error, the engine of each site counts a failed execution. The count is a part of later requests.
So collectives of later executions do not match those of the failed execution on other ranks (see TensorQueue).

TensorFlow has no hook for calls. Every call of a graph from Python goes through AtomicFunction.call_flat, which this
module replaces. Only in asynchronous execution (set_synchronous_execution(False)) are errors raised elsewhere.
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/python/eager/polymorphic_function/atomic_function.py#L219
"""

import functools
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import tensorflow as tf

from ...api import runtime
from ...core.errors import InvalidRequestError, NotInitializedError, RanksLostError
from ...core.handle import Origin
from ...process.error_text import is_users
from . import names
from .private_names import AtomicFunction, set_node_attribute
from .tf_errors import as_tf_error


class CallSite:
    """A node of a graph that submits a collective. `name`: The name of the collective, without the thread.

    The graph keeps the CallSite alive. The CallSite must not refer to the graph, or neither would ever be freed.
    """

    origin: Origin  # The node.
    is_in_order = True  # Whether executions of the graph are in the order of the program.
    # The exception of a signal handler while the node ran in the main thread; raised at the end of the call.
    raised: BaseException | None = None

    def __init__(self, name: str, process_set: int):
        self.name, self.process_set, self.is_made = name, process_set, names.is_made(name)
        # Whether the ranks must be able to distinguish the thread from all others.
        self.needs_name = self.is_made and not process_set
        # The beginning of the full name, for the thread that runs the function; "" if a user or an optimizer gave it.
        self.thread = ""
        # The threads that run a function with this node now. Operations on lists are atomic.
        self.running: list[int] = []

    def belongs_to(self, submit: tf.Operation) -> None:
        """Register `submit`, which submits the collective, as the node of this CallSite."""
        graph = weakref.ref(tf.compat.v1.get_default_graph())
        self.origin = Origin(functools.partial(_place_of, submit.name, graph),
                             self.is_in_order and names.is_in_order(self.name))
        _sites[_key_of(submit.node_def)] = self

    def before_run(self, session: object) -> None:
        """Called before a session runs the node."""

    def all_names(self) -> set[str]:
        """Return the names of all collectives that the node may have submitted in the latest call of the graph."""
        return {self.thread + self.name}


_SITE_ATTRIBUTE = "_mpistrat_site"
_sites: "weakref.WeakValueDictionary[bytes, CallSite]" = weakref.WeakValueDictionary()


def _key_of(node: tf.compat.v1.NodeDef) -> bytes:
    """Return the key by which `_sites` finds the CallSite of a node; b"" if the node has no key."""
    for name in ("token", _SITE_ATTRIBUTE):
        if name in node.attr:
            return bytes(node.attr[name].s)
    return b""


def set_key(node: tf.Operation, number: int) -> None:
    """Store in `node` the number of the object that the node calls: the key by which `_sites` finds its CallSite."""
    set_node_attribute(node, _SITE_ATTRIBUTE, tf.compat.v1.AttrValue(s=str(number).encode()))


def _place_of(node: str, graph: "weakref.ref[tf.Graph]") -> str:
    """Return the place in the user's code that made a node of a graph: file, line and function."""
    found = graph()
    if found is None:
        return f"the node {node}"
    # Read here, as it takes milliseconds, and does not outlive the node.
    frames = [frame for frame in found.get_operation_by_name(node).traceback if is_users(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else f"the node {node}"


def _sites_in(function: AtomicFunction) -> tuple[CallSite, ...]:
    """Return the sites in a function and in all functions that it calls."""
    def nodes_of(name: str) -> Iterable[tf.compat.v1.NodeDef]:
        with suppress(tf.errors.NotFoundError):  # A function of a dataset that the runtime has made.
            return function._bound_context.get_function_def(name).node_def
        return ()

    return sites_among(function.cached_definition.node_def, nodes_of)


def sites_among(nodes: Iterable[tf.compat.v1.NodeDef], nodes_of: Callable[[str], Iterable[tf.compat.v1.NodeDef]]
                ) -> tuple[CallSite, ...]:
    """Return the sites of `nodes`, and of all functions that they call. `nodes_of(name)` returns a function's nodes."""
    found: dict[CallSite, None] = {}
    todo, seen = [nodes], {""}
    while todo:
        for node in todo.pop():
            if (site := _sites.get(_key_of(node))) is not None:
                found[site] = None
            for value in node.attr.values():
                for function in (value.func, *value.list.func):  # An attribute without a function has the name "".
                    if function.name not in seen:
                        seen.add(function.name)
                        todo.append(nodes_of(function.name))
    return tuple(found)


def _observed(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def observed(function: AtomicFunction, *args: tf.Tensor) -> Any:
        known = function.__dict__  # One of these objects has a graph that does not change.
        sites = known.get("_mpistrat_sites")
        if sites == () or not (sites or _sites) or not function._bound_context.executing_eagerly():
            return call(function, *args)
        if sites is None:
            sites = known["_mpistrat_sites"] = _sites_in(function)
            if not sites:
                return call(function, *args)
        return observed_call(sites, call, function, *args)
    return observed


def observed_call(sites: Sequence[CallSite], call: Callable[..., Any], *args: object) -> Any:
    """Return `call(*args)`, which runs a graph with these sites in this thread. The engines count a failed call.

    Raises RanksLostError: Ranks were lost during the call.
    """
    try:
        _enter(sites)
        return call(*args)
    except tf.errors.OpError as error:  # Others come from this thread: of a signal handler, after the graph.
        _end_failed(sites)
        has_loss = runtime.is_initialized() and RanksLostError.__name__ in str(error)
        if has_loss and (lost := runtime.current().losses.interruption.error) is not None:
            raise as_tf_error(lost) from None  # Its text is in `error`, between all that TensorFlow knows of.
        raise
    finally:
        _leave(sites)


def _enter(sites: Sequence[CallSite]) -> None:
    """Record that this thread begins a call of a graph with these sites.

    Raises InvalidRequestError: Another thread is running one of these nodes; or `names.prefix` raises it.
    """
    needs_name = False
    for site in sites:
        needs_name |= site.needs_name
    prefix, thread = names.prefix(not needs_name), threading.get_ident()
    for site in sites:
        site.running.append(thread)
    for site in sites:
        if site.running.count(thread) < len(site.running):
            _refuse(site)
        if site.is_made:
            site.thread = prefix


def _leave(sites: Sequence[CallSite]) -> None:
    """Record that this thread's call has ended. If a signal handler raised an exception meanwhile, raise it now."""
    thread, late = threading.get_ident(), None
    for site in sites:
        if thread in site.running:
            site.running.remove(thread)
        if site.raised is not None:
            late = site
    if late is not None and threading.current_thread() is threading.main_thread():
        error, late.raised = late.raised, None
        assert error is not None
        raise error


def _refuse(site: CallSite) -> None:
    problem = (f"{site.name}: two threads run one graph with this collective at the same time, one of them the thread "
               f"{threading.current_thread().name!r}. The ranks cannot tell the two apart, and would mix up their "
               f"tensors. Give each thread a separate function or graph. The collective comes from "
               f"{site.origin.place()}.")
    # On all ranks: each rank may find another thread first.
    runtime.group_of(site.name, site.process_set).engine.break_off(problem)
    raise InvalidRequestError(problem)


def _end_failed(sites: Sequence[CallSite]) -> None:
    by_set: defaultdict[int, list[CallSite]] = defaultdict(list)
    for site in sites:
        by_set[site.process_set].append(site)
    for number, its in by_set.items():
        with suppress(NotInitializedError, InvalidRequestError):  # shutdown(), or a process set that was removed.
            runtime.group_of(its[0].name, number).engine.end_failed_execution(
                {name for site in its for name in site.all_names()}, {site.origin for site in its})


AtomicFunction.call_flat = _observed(AtomicFunction.call_flat)
