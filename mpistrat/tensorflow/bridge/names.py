"""Names of collectives: this module makes the name of each collective that the user does not name.

The ranks match collectives by name. A *made* name consists only of parts that the program determines:

- the thread, if it is not the main thread: the name that the user gave to the thread, or the function that the thread
  runs. The name of a collective in a graph gets this part when Python calls the graph (see `bridge.calls`);
- in a graph, the Python function whose trace contains the collective, as `step()`. It is the innermost tf.function,
  because TensorFlow uses one trace of an inner function in several outer functions;
- the operation. In a graph, also its number in the function with its branches and loops, counted for each process set.

So a name does not depend on what else a process has built or traced. It contains no name or number of a tensor, a layer
or a model, and no number of a trace. Each optimizer has its own name, so that several threads may train. Names that
users give are kept. In a graph they get the name scope as a prefix, as in Horovod.

Within a thread, collectives of one name are matched in the order of the program, which `bridge.program_order` keeps.
Between threads there is no order. So two threads that the ranks cannot tell apart must not use made names, and two
threads must not run one function at the same time.

An execution of a graph that ends in an error breaks that order, because some of its collectives are not submitted. So
each request contains the number of failed executions, and requests of different executions do not match (engine.queue).
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
    """Return the name of an eager collective of this thread. `operation`: The purpose of the collective. Local.

    Raises InvalidRequestError: This process has another thread that the ranks cannot distinguish from this one, and the
    collective is for all ranks.
    """
    return f"{prefix(is_exclusive=process_set != 0)}{operation}"


def made(operation: str, process_set: int = 0) -> str:
    """Return `eager(...)` in eager code; in a graph "<traced function>()/<operation>", without a thread."""
    return eager(operation, process_set) if tf.executing_eagerly() else f"{_title()}/{of(operation, process_set)}"


def of(owner: str, process_set: int = 0) -> str:
    """Return a name for a collective of `owner`, which is the name of an optimizer, an operation or a collective.

    The result is `owner`. If a function has several collectives of one owner, the second and later names get a number,
    because a function does not wait for a collective before it submits the next. Each process set has its own numbers,
    since ranks that are not in the set do not trace its collectives.
    """
    if tf.executing_eagerly():
        return owner
    counter = _counters.setdefault(enclosing_function(), Counter())
    counter[owner, process_set] += 1
    number = counter[owner, process_set]
    return owner if number == 1 else f"{owner}_{number - 1}"


def of_gradient(name: str, process_set: int) -> str:
    """Return a name for the collective in the gradient of collective `name`; in a graph, a new name at each call."""
    return of(f"{name}/gradient", process_set)


def given(name: str, ignore_name_scope: bool) -> str:
    """Return the user's `name`. In a graph, add the name scope unless it is ignored, and a number if it is taken."""
    if tf.executing_eagerly():
        return name
    unique = tf.compat.v1.get_default_graph().unique_name(re.sub("[^a-zA-Z0-9_]", "_", name))
    return unique.rsplit("/", 1)[-1] if ignore_name_scope else unique


def is_made(name: str) -> bool:
    """Return whether the name of a collective in a graph comes from `made`, not from a user or an optimizer."""
    return "()/" in name


def is_in_order(name: str) -> bool:
    """Return whether graphs submit the collectives of this name in program order on all ranks.

    True for made names, except in the gradient of a function, where names contain the number of the execution instead.
    """
    return "()/" in name and not name.startswith(_GRADIENT_OF)


def _title() -> str:
    """Return the part of names that stands for the traced function: `step()`, `gradient of step()` or `session()`."""
    name = getattr(enclosing_function(), "name", "session")  # A graph of a session has none.
    gradient = _GRADIENT.fullmatch(name)
    return f"{_GRADIENT_OF}{gradient[1]}()" if gradient else f"{name}()"


# -- optimizers -------------------------------------------------------------------------------------------------------


class OptimizerName:
    """The name of an optimizer. It contains the number of the optimizer among those of its thread and process set.

    All existing optimizers get their numbers when the first of them averages gradients. So an optimizer that is deleted
    before then gets no number, and need not exist on all ranks. A copy is numbered among the copies of its `original`.
    So a copy that exists on one rank only does not change the names of other optimizers.
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
        """Make pickle and copy store only two numbers, with which `_at` finds this object or makes a new one."""
        return _at, (self.place, self._process_set)

    def __call__(self) -> str:
        """Return the name. Called when the optimizer averages gradients.

        Raises InvalidRequestError: As `eager`, but only in the thread that made the optimizer, or one of the same name.
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
    """Return the OptimizerName with the number `place`, or a new one if this process has none with that number."""
    return _by_place.get(place) or OptimizerName(process_set)


def _run_of(process_set: int) -> int:
    """Return a number for the current init(), as a later one reuses ids of process sets; 0 for the set of all ranks."""
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

    `is_exclusive`: Whether the ranks need not distinguish threads with the same prefix, because the collectives belong
        to a process set, or their names come from users or optimizers. If True, this function raises nothing.

    Raises InvalidRequestError: As `eager`. In a job of several ranks this also ends the engines of all ranks.
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
    """Return the part of names that stands for this thread: "" for the main thread, else its kind_of() and "/"."""
    thread = threading.current_thread()
    return "" if thread is threading.main_thread() else f"{kind_of(thread.name)}/"


def kind_of(name: str) -> str:
    """Return the name of a thread without the numbers that Python has added."""
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
