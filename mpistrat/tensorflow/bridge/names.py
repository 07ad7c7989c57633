"""Names of collectives: this module makes all names that users do not give.

The ranks match collectives by name. A name that is made here has only parts that the program determines:

- the thread that runs the collective, if it is not the main thread: the name that the user gave it, or the function
  that the thread runs. In a graph it is put before the name when Python calls the graph (see `bridge.calls`);
- in a graph the Python function whose trace contains the collective, as `step()`. It is the innermost one, because
  TensorFlow uses one trace of an inner function in several outer ones;
- the operation, and in a graph its number in that function with its branches and loops, counted per process set.

So a name does not depend on what else a process has built or traced: it has no name or number of a tensor, a layer or a
model, and no number of a trace. An optimizer has a name of its own, so that several threads may train. Names that users
give stay as they are, as in Horovod with the name scope around them.

Within a thread, collectives of one name are matched in the order of the program, which `bridge.program_order` keeps.
Between threads there is no order. So two threads that the ranks cannot tell apart must not use made names, and two
threads must not run one function at the same time.

An execution of a graph that ends in an error breaks that order. Requests have the number of such executions, so that
requests of different executions do not match: see `engine.queue`.
"""

import gc
import itertools
import re
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import tensorflow as tf

from ...api import runtime
from ...api.job import Job
from ...core.errors import InvalidRequestError
from .program_order import enclosing_function

# Names that Python generates: threading.Thread's default, executors' threads, and threads of other origin.
_NUMBERED = re.compile(r"(?:(?P<thread>Thread)-\d+(?P<target> \(.*\))?|(?P<foreign>Dummy)-\d+|"
                       r"(?P<executor>ThreadPoolExecutor)-\d+_\d+|(?P<prefix>.+)_\d+)")
# Any of TensorFlow's threads may run a tf.py_function, in the order of the graph.
_FOREIGN = "Dummy"
# TensorFlow numbers the gradients of functions in the order in which the process traces them.
_GRADIENT = re.compile(r"__backward_(.*)_\d+")
_GRADIENT_OF = "gradient of "

_counters: "weakref.WeakKeyDictionary[tf.Graph, Counter[tuple[str, int]]]" = weakref.WeakKeyDictionary()


def eager(operation: str, process_set: int = 0) -> str:
    """The name of an eager collective of this thread. `operation`: The purpose of the collective. Local.

    Raises InvalidRequestError: This process has another thread that the ranks cannot distinguish from this one, and the
    collective is for all ranks.
    """
    return f"{prefix(is_exclusive=process_set != 0)}{operation}"


def made(operation: str, process_set: int = 0) -> str:
    """As `eager`; in a graph the name of a collective of the function that is being traced, without the thread."""
    return eager(operation, process_set) if tf.executing_eagerly() else f"{_title()}/{of(operation, process_set)}"


def of(owner: str, process_set: int = 0) -> str:
    """The name of a collective that belongs to a named owner: an optimizer, or a collective with a gradient.

    The name is `owner`. In a graph, the second collective of the function and later ones get a number, because a
    function does not wait for a collective before it submits the next. Each process set has a separate count, since
    ranks that are not in the set do not trace its collectives.
    """
    if tf.executing_eagerly():
        return owner
    counter = _counters.setdefault(enclosing_function(), Counter())
    counter[owner, process_set] += 1
    number = counter[owner, process_set]
    return owner if number == 1 else f"{owner}_{number - 1}"


def of_gradient(name: str, process_set: int) -> str:
    """The name of the collective in the gradient of the collective `name`; in a graph, a new name at each call."""
    return of(f"{name}/gradient", process_set)


def given(name: str, ignore_name_scope: bool) -> str:
    """The name of a collective with a user-defined `name`; in a graph a new name at each call, with the name scope."""
    if tf.executing_eagerly():
        return name
    unique = tf.compat.v1.get_default_graph().unique_name(re.sub("[^a-zA-Z0-9_]", "_", name))
    return unique.rsplit("/", 1)[-1] if ignore_name_scope else unique


def is_made(name: str) -> bool:
    """Whether a name in a graph comes from `made`, and not from a user or an optimizer."""
    return "()/" in name


def is_in_order(name: str) -> bool:
    """Whether every rank submits the collectives of this name in graphs in program order. True for made names only.

    False in the gradient of a function: the names of its collectives differ by the number of the execution.
    """
    return "()/" in name and not name.startswith(_GRADIENT_OF)


def _title() -> str:
    """The part of names for the function that is being traced: `step()`, `gradient of step()`, or `session()`."""
    name = getattr(enclosing_function(), "name", "session")  # A graph of a session has none.
    gradient = _GRADIENT.fullmatch(name)
    return f"{_GRADIENT_OF}{gradient[1]}()" if gradient else f"{name}()"


# -- optimizers -------------------------------------------------------------------------------------------------------


class OptimizerName:
    """The name of an optimizer: its number among those that its thread has made for its process set.

    Optimizers get their numbers when the first of them averages. So an optimizer that only one rank has created, and
    deleted before, gets no number. A copy is numbered among the copies of its `original`, so that a copy on one rank
    only does not change the names of other optimizers.
    """

    def __init__(self, process_set: int, original: "OptimizerName | None" = None):
        self.place = next(_places)  # The number among all optimizers of this process, for their order.
        self._thread, self._process_set = _kind_of_this_thread(), process_set
        self._group = self._thread, process_set, _run_of(process_set)
        self._name, self._original, self._copies = "", original, itertools.count(1)
        _by_place[self.place] = self
        if original is None:
            _unnamed[self._group].append(weakref.ref(self))
        else:
            self._number = next(original._copies)

    def __reduce__(self) -> Any:
        """pickle and copy store the place, and look the name up by its place."""
        return _at, (self.place, self._process_set)

    def __call__(self) -> str:
        """Return the name. Called when the optimizer averages.

        Raises InvalidRequestError: The optimizer was not made in the main thread, and another thread, which the ranks
        cannot distinguish from this one, may have made it.
        """
        if self._original is not None:
            return f"{self._original()}/copy{self._number}"
        if self._name:
            return self._name
        if self._thread == _kind_of_this_thread():
            prefix(self._process_set != 0)  # For its error.
        with _naming:
            if len([other for other in _unnamed[self._group] if other() is not None]) > 1:
                gc.collect()  # A model that was dropped refers to itself.
            for other in _unnamed.pop(self._group):
                found = other()
                if found is not None and not found._name:
                    found._name = f"{self._thread}optimizer{next(_numbers[self._group])}"
        return self._name


def _at(place: int, process_set: int) -> OptimizerName:
    """Return the name with this place, or a new name in a process that does not have the place."""
    return _by_place.get(place) or OptimizerName(process_set)


def _run_of(process_set: int) -> int:
    """A number that distinguishes process sets of different calls of init(), which reuse ids; 0 for all ranks."""
    if process_set == 0 or not runtime.is_initialized():
        return 0
    return _runs.setdefault(runtime.current(), next(_run_numbers))


_by_place: "weakref.WeakValueDictionary[int, OptimizerName]" = weakref.WeakValueDictionary()
_naming = threading.RLock()  # The garbage collector may run any code.
_places = itertools.count()
_run_numbers = itertools.count(1)
_runs: "weakref.WeakKeyDictionary[Job, int]" = weakref.WeakKeyDictionary()
# By the thread that makes them, the process set and its run: the optimizers without a name, and the next number.
_unnamed: defaultdict[tuple[str, int, int], "list[weakref.ref[OptimizerName]]"] = defaultdict(list)
_numbers: defaultdict[tuple[str, int, int], itertools.count] = defaultdict(lambda: itertools.count(1))


# -- threads ----------------------------------------------------------------------------------------------------------


class _ThreadSpace(threading.local):
    space: str | None = None


_state = _ThreadSpace()
_MAIN = threading.main_thread().ident


def prefix(is_exclusive: bool = False) -> str:
    """Return what the names of this thread's collectives begin with: "" in the main thread, elsewhere "<thread>/".

    `is_exclusive`: Whether the process set is not that of all ranks. Then other threads are not checked.

    Raises InvalidRequestError: As `eager`. In a job of several ranks, the error also ends the engine.
    """
    if _state.space is not None:
        return _state.space
    if threading.get_ident() == _MAIN:
        return ""
    kind, thread = _kind_of_this_thread(), threading.current_thread()
    if is_exclusive or kind == f"{_FOREIGN}/":
        return kind
    for other in threading.enumerate():
        if other is not thread and f"{kind_of(other.name)}/" == kind:
            _refuse(thread, other)
    return kind


def _refuse(thread: threading.Thread, other: threading.Thread) -> NoReturn:
    where = f" on rank {runtime.current().topology.rank}" if runtime.is_initialized() else ""
    problem = (
        f"the threads {thread.name!r} and {other.name!r} are both alive{where}, and {thread.name!r} uses a collective "
        "without a name (for example a gradient of a tape, or a metric of MPIStrategy). The ranks cannot tell the two "
        "apart, and would mix up their tensors. Give each thread a different name that is the same on all ranks: "
        "threading.Thread(..., name='evaluation'). Or give each thread a separate DistributedOptimizer or process "
        "set.")
    if runtime.is_initialized() and runtime.current().topology.size > 1:
        # On all ranks: on another rank the two threads may not meet, and one of them would wait for this rank.
        runtime.current().engine.break_off(problem)
    raise InvalidRequestError(problem)


def _kind_of_this_thread() -> str:
    """The part of names that stands for this thread: empty for the main thread."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f"{kind_of(thread.name)}/"


def kind_of(name: str) -> str:
    """The name of a thread without the numbers that Python has added."""
    found = _NUMBERED.fullmatch(name)
    return "".join(part for part in found.groups() if part) if found else name


@contextmanager
def name_space(name: str) -> Iterator[None]:
    """A context in which the names of this thread's collectives begin with `name` instead of the thread's prefix."""
    before, _state.space = _state.space, f"{name}/"
    try:
        yield
    finally:
        _state.space = before
