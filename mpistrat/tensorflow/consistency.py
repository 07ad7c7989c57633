"""Checks of the first reductions of gradients: the ranks train the same weights, and not all on the same data.

With each of the first reductions a rank sends digests of its weights and of its local gradients, without waiting for
the digests of the other ranks. The digests have arrived when a later reduction begins, because each rank sends digests
before gradients. Then each rank decides. All ranks have the same digests, so all ranks decide the same. Whether a rank
sends digests depends only on the number of reductions, which is the same on all ranks.

- Weights that differ are an error before the third step. A difference before the first step is no error: models without
  an Input layer, and loops as in Horovod's examples, broadcast after the first step.
- Gradients with the same bits on all ranks in two steps, from the same weights, mean that the batches are the same, or
  that a tape has reduced the gradients before an optimizer does. The rank warns, unless other gradients differ: the
  generator of a GAN may get the same noise on all ranks, and its discriminator other images.

Called by the gradient reducers, the callbacks and fit.
"""

import hashlib
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_

import numpy as np
import tensorflow as tf

from ..api import runtime
from ..api.group import Group
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import CollectiveError, MismatchError
from ..core.handle import Handle
from ..core.request import allgather_request, specs_of
from ..core.topology import MOST_LISTED, rank_list
from .async_op.submission import Observer
from .bridge.private_names import SynchronousExecution
from .bridge.types import Variable
from .digests import DIGEST_BYTES, digest_of
from .graph.cpu import to_array

logger = logging.getLogger(__name__)

_EXCHANGES = 3  # the reductions with which digests are sent, for the same variables
# Tapes send them in their first reductions, and in as many after 16, 32, 64 and so on: another training may follow.
# In a graph they send them in the first ones only.
_WINDOW = 8
_OF_GRAPHS = 24  # where the first gap is
_RANK_BYTES = 4
_NOTHING = bytes(DIGEST_BYTES)  # the digest of gradients that are all zero, or not finite: they may well be equal
# Digests of an earlier step have arrived, unless steps overlap. Then the check is left out.
_WAIT_S = 1.0

SHARD = "x, y = hvd.shard(x, y)"

# The digests of one rank: of its gradients, and then of each variable, if they were read.
Digests = list[bytes]

_has_warned = False
_all: "weakref.WeakSet[FirstSteps]" = weakref.WeakSet()


@dataclass
class _Exchange:
    """The digests of all ranks."""

    # Which of the lists of variables it is for. On other ranks it is the same, unless their programs differ.
    index: int
    labels: Sequence[str]  # What users call the variables.
    handle: Handle  # Of the exchange, whose rows begin with the index.


class FirstSteps:
    """The digests of the first reductions of an optimizer, or of all tapes.

    Args:
        name: The name of the optimizer or the purpose of the tapes, the same on all ranks.
        is_of_tapes: Whether tapes reduce. A step may use several tapes, or a new tape. Reductions of different lists
            of variables are checked separately.
        way_out: For the warning: the code by which each rank gets different data.
    """

    def __init__(self, name: str, process_set: ProcessSet = global_process_set, is_of_tapes: bool = False,
                 way_out: str = SHARD):
        # is_paused: The weights are going to be broadcast, and reductions before that do not count.
        # is_done: There is nothing left to check.
        self.is_paused = self.is_done = False
        # Returns the digest of each variable's value, or nothing if that is not known.
        self.digests_of: Callable[[Sequence[Variable]], Digests] = digests_of_weights
        self._purpose, self._name = name, f"check/{name}"
        self._process_set, self._is_of_tapes, self._way_out = process_set, is_of_tapes, way_out
        self._count = 0  # of the reductions so far
        self._joins: int | None = None  # how often the ranks had joined before the first step
        self._exchanges: list[_Exchange] = []
        self._lists: list[Sequence[weakref.ref[Variable]]] = []  # the variables of each index
        self._differed: set[int] = set()  # the indices where gradients of the same weights differed among the ranks
        _all.add(self)

    def observer(self, variables: Sequence[Variable], labels: Sequence[str], may_read: bool = True) -> Observer | None:
        """The function to call with this rank's gradients before they are reduced; None if there is nothing to check.

        The function raises MismatchError, on every rank, if the ranks train different weights. `may_read`: Whether no
        variable changes before its gradient is reduced. If False, weights are not compared.
        """
        if self.is_done or not runtime.current().settings.is_checked:
            return None
        in_graph = not tf.executing_eagerly()
        if self._is_of_tapes and not in_graph and not _is_due(self._count):
            self._count += 1
            return None
        return partial(self._observe, [weakref.ref(v) for v in variables], labels, may_read, in_graph)

    def conclude(self) -> None:
        """Decide now, for an epoch of two or three steps. All ranks must call it after the same number of reductions.

        Raises MismatchError: On every rank, if the ranks train different weights.
        """
        if not self._has_joined and not self.is_done:
            self._require_equal_weights()
            self._warn_of_equal_data(0)

    def _observe(self, variables: Sequence["weakref.ref[Variable]"], labels: Sequence[str], may_read: bool,
                 in_graph: bool, gradients: Sequence[np.ndarray], thread: str) -> bool:
        if thread and self._is_of_tapes:
            its = of_tapes(f"{thread}{self._purpose}", self._process_set)
            return its._observe(variables, labels, may_read, in_graph, gradients, "")
        if self.is_paused:
            return True
        if self._joins is None:
            self._joins = self._group.joins
        if self._has_joined:
            self._end()  # The ranks have made different numbers of steps.
        if self.is_done or (self._is_of_tapes and in_graph and self._count >= _OF_GRAPHS):
            return False
        self._require_equal_weights()
        index = self._index_of(variables)
        earlier = self._of_list(index)
        if len(earlier) == _EXCHANGES:
            self._warn_of_equal_data(index)
            if not self._is_of_tapes:
                self._end()
                return False
        digests = [_digest_of(gradients) if len(earlier) < _EXCHANGES else _NOTHING]
        if may_read and (not earlier or (len(earlier) == 1 and differing(self._received(earlier[0])))):
            found = [each for each in (variable() for variable in variables) if each is not None]
            digests += self.digests_of(found) if len(found) == len(variables) else []
        name = f"{self._name}/{self._count}"
        rows = [index.to_bytes(DIGEST_BYTES, "little"), *digests]
        self._exchanges.append(_Exchange(index, labels, _send(self._group, name, rows)))
        self._count += 1
        return True

    def _end(self) -> None:
        self.is_done = True
        self._exchanges.clear()

    def _index_of(self, variables: Sequence["weakref.ref[Variable]"]) -> int:
        """The index of this list among all lists of variables, in the order of their first reductions."""
        if not self._is_of_tapes:
            self._lists = [variables]
            return 0
        for index, known in enumerate(self._lists):
            # While a weakref.ref is kept, it is the only one of its object, even after the object was deleted.
            if len(known) == len(variables) and all(map(is_, known, variables)):
                return index
        self._lists.append(variables)
        return len(self._lists) - 1

    def _of_list(self, index: int) -> list[_Exchange]:
        return [exchange for exchange in self._exchanges if exchange.index == index]

    @property
    def _group(self) -> Group:
        return self._process_set.group(self._name)

    @property
    def _has_joined(self) -> bool:
        return self._joins is not None and self._group.joins != self._joins

    def _require_equal_weights(self) -> None:
        """Raise MismatchError if the weights differed in the first two reductions for the latest list of variables."""
        latest = self._exchanges[-1:]
        same = self._of_list(latest[0].index) if latest else []
        if len(same) != 2:
            return
        received = {id(exchange): self._received(exchange) for exchange in self._exchanges}
        # Another rank may have other indices before. Then it does not come here with the same two exchanges.
        if all(received.values()) and all(differing(received[id(exchange)]) for exchange in same):
            raise MismatchError(describe_weights(same[1].labels, received[id(same[1])],
                                                 self._group.topology.job_ranks))

    def _warn_of_equal_data(self, index: int) -> None:
        received = [self._received(each) for each in self._of_list(index)]
        if has_other_data(received):
            self._differed.add(index)
        if self._group.topology.rank or not is_same_data(received):
            return
        apart = [(other, other._lists[there]) for other in list(_all) for there in other._lists_that_differ()]
        own = set(map(id, self._lists[index]))  # Each object has only one weakref.ref, see _index_of.
        if not self._is_of_tapes and any(other._is_of_tapes and own <= set(map(id, variables))
                                         for other, variables in apart):
            _warn_once("gradients are reduced twice: by a DistributedGradientTape, and then by a DistributedOptimizer. "
                       "Keep only one: apply the gradients of the tape with the optimizer that was wrapped.")
        elif not apart:
            warn_of_equal_data("their gradients had the same bits in the first steps", self._way_out)

    def _lists_that_differ(self) -> list[int]:
        return [index for index in range(len(self._lists)) if index in self._differed
                or has_other_data([self._received(each, 0.0) for each in self._of_list(index)])]

    def _received(self, exchange: _Exchange, wait_s: float = _WAIT_S) -> list[Digests]:
        """The digests of all ranks; [] if they are not known, a rank had joined, or the ranks have other indices."""
        try:
            rows, = exchange.handle.wait(wait_s)
        except (TimeoutError, CollectiveError):  # An error of the engine is raised by the reduction too.
            return []
        found = by_rank(rows)
        is_complete = len(found) == self._group.topology.size and len({index for index, *_ in found}) == 1
        return [digests for _, *digests in found] if is_complete else []


def warn_of_equal_data(why: str, way_out: str = SHARD) -> None:
    """Warn once in this process that all ranks train on the same data, and say how that is known. Local."""
    _warn_once(f"all ranks train on the same data: {why}. Give each rank its own rows: {way_out}.")


def _warn_once(sentence: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning("mpistrat: %s", sentence)


def differing(digests: Sequence[Digests]) -> list[int]:
    """The indices of the variables that differ among the ranks; [] if the ranks cannot be compared."""
    if len({len(of_rank) for of_rank in digests}) != 1:
        return []
    return [i - 1 for i in range(1, len(digests[0])) if len({of_rank[i] for of_rank in digests}) > 1]


def is_same_data(received: Sequence[Sequence[Digests]]) -> bool:
    """Whether the gradients were the same on all ranks in at least two reductions, and never different.

    Reductions of different weights do not count. `received` has [] for reductions whose digests are not known.
    """
    gradients = _gradients(received)
    return len(gradients) >= 2 and all(len(found) == 1 and _NOTHING not in found for found in gradients)


def has_other_data(received: Sequence[Sequence[Digests]]) -> bool:
    """Whether the gradients of the same weights differed among the ranks. `received`: As for is_same_data."""
    return any(len(found) > 1 for found in _gradients(received))


def _gradients(received: Sequence[Sequence[Digests]]) -> list[set[bytes]]:
    """The digests of the ranks' gradients in each reduction of the same weights."""
    counted = [digests for digests in received if digests]
    while counted and differing(counted[0]):
        counted = counted[1:]
    return [{of_rank[0] for of_rank in digests} for digests in counted]


def describe_differing(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """A text that says which variables differ, and among which ranks. At least one variable must differ.

    `ranks_of`: The rank in the job for each element of `digests`; () means 0, 1, 2 and so on.
    """
    different = differing(digests)
    groups: dict[bytes, list[int]] = {}
    for rank, of_rank in enumerate(digests):
        groups.setdefault(of_rank[1 + different[0]], []).append(ranks_of[rank] if ranks_of else rank)
    listed = [rank_list(ranks) for ranks in groups.values()]
    more = f" and {len(listed) - MOST_LISTED} more groups" if len(listed) > MOST_LISTED else ""
    where = (" and " if len(listed) == 2 else ", ").join(listed[:MOST_LISTED]) + more
    more = f" So do {len(different) - 1} more of {len(labels)} variables." if len(different) > 1 else ""
    return f"the values of {labels[different[0]]} differ between ranks {where}.{more}"


def describe_weights(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """The text of the error of ranks that train different weights. The arguments are those of describe_differing."""
    return (f"the ranks train different weights: {describe_differing(labels, digests, ranks_of)}"
            " Broadcast them before training: add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks "
            "of fit, or call hvd.broadcast_variables(model.weights, root_rank=0) before a loop of your own; in a "
            "session add hvd.BroadcastGlobalVariablesHook(0), or run hvd.broadcast_global_variables(0). "
            "Exempt a variable that is local to each rank with register_local_var (of the optimizer) or "
            "register_local_source (of the tape). If each rank changes the weights on purpose before the gradient, as "
            "in MAML, pass check_weights=False to DistributedGradientTape or DistributedOptimizer. "
            "MPISTRAT_CHECK_ACTION=off switches this check off.")


def by_rank(rows: np.ndarray) -> list[Digests]:
    """The digests of each rank, from the gathered rows. Each row begins with its rank."""
    found: dict[int, Digests] = {}
    for row in rows:
        found.setdefault(int.from_bytes(row[:_RANK_BYTES].tobytes(), "little"), []).append(row[_RANK_BYTES:].tobytes())
    return [found[rank] for rank in sorted(found)]


def _send(group: Group, name: str, digests: Digests) -> Handle:
    """Begin to gather the digests of all ranks. Collective; returns at once."""
    head = group.topology.rank.to_bytes(_RANK_BYTES, "little")
    rows = np.frombuffer(b"".join(head + digest for digest in digests), np.uint8).reshape(len(digests), -1)
    return group.engine.submit(allgather_request(name, specs_of([rows])), [rows])


def _digest_of(gradients: Sequence[np.ndarray]) -> bytes:
    says_something = any(np.any(g) for g in gradients) and all(np.all(np.isfinite(g)) for g in gradients)
    if not says_something:
        return _NOTHING
    return hashlib.blake2b(b"".join(map(digest_of, gradients)), digest_size=DIGEST_BYTES).digest()


def digests_of_weights(variables: Sequence[Variable]) -> Digests:
    """The digest of each variable's value, read at once. It copies no CPU tensor."""
    with SynchronousExecution():
        return [digest_of(to_array(tf.convert_to_tensor(variable))) for variable in variables]


def _is_due(count: int) -> bool:
    """Whether digests are sent with this reduction of tapes, counted from 0."""
    return count < _WINDOW or count - (1 << (count.bit_length() - 1)) < _WINDOW


_of_tapes: "weakref.WeakKeyDictionary[Group, dict[str, FirstSteps]]" = weakref.WeakKeyDictionary()


def of_tapes(name: str, process_set: ProcessSet) -> FirstSteps:
    """The FirstSteps of all tapes of a process set. Eager code makes a tape for each step. `name` is the purpose."""
    known = _of_tapes.setdefault(process_set.group(name), {})
    if name not in known:
        known[name] = FirstSteps(name, process_set, is_of_tapes=True)
    return known[name]


_readers: dict[int, tuple["weakref.ref[Variable]", str]] = {}


def _forget(key: int, _: object) -> None:
    _readers.pop(key, None)


def read_alone(variables: Sequence[Variable], reader: str) -> list[Variable]:
    """The variables of this list that only the reducer `reader` reads in a graph. Local.

    Nothing orders a callback that reads a variable for one optimizer, and another optimizer's change in the same step.
    """
    for variable in variables:
        key = id(variable)
        if key not in _readers:
            _readers[key] = weakref.ref(variable, partial(_forget, key)), reader
    return [variable for variable in variables if _readers[id(variable)][1] == reader]
