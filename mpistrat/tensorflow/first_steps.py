"""Checks of the first reductions of gradients: the ranks train the same weights, and not all on the same data.

With each of the first reductions a rank sends digests of its weights and of its local gradients, without waiting for
those of the others. They have arrived when a later reduction begins, because each rank sends them before its gradients.
Then the rank decides. All ranks have the same digests, so all decide the same.

- Weights that differ are an error before the third step. A difference before the first step is none: models without an
  Input layer, and loops as in Horovod's examples, broadcast after it.
- Gradients with the same bits on all ranks in two steps, from the same weights, mean that the batches are the same.
  That is a warning.

Called by the gradient reducers, the callbacks and fit.
"""

import hashlib
import logging
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ..api import runtime
from ..api.group import Group
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import CollectiveError, MismatchError
from ..core.handle import Handle
from ..core.request import allgather_request, specs_of
from ..core.stalls import MOST_LISTED
from ..core.topology import rank_list
from .bridge import executions
from .bridge.observers import Observer
from .bridge.own_executor import SynchronousExecution
from .types import Variable

logger = logging.getLogger(__name__)

_EXCHANGES = 3  # the reductions with which digests are sent
_DIGEST_BYTES = 8
_RANK_BYTES = 4
_NOTHING = bytes(_DIGEST_BYTES)  # the digest of gradients that are all zero, or not finite: they may well be equal
# Digests of an earlier step are there already, unless steps overlap. Then the check is left out.
_WAIT_S = 1.0

# The digests of one rank: of its gradients, and then of each variable, if they were read.
Digests = list[bytes]

_has_warned = False


class FirstSteps:
    """What is known of the first reductions of an optimizer, or of the variables of a tape.

    Args:
        name: The same on all ranks.
        process_set: The ranks that reduce.

    Attributes:
        is_paused: The weights are going to be broadcast, and reductions before that do not count.
    """

    def __init__(self, name: str, process_set: ProcessSet = global_process_set):
        self.is_paused = False
        self._name, self._process_set = f"check/{name}", process_set
        self._step = 0
        self._joins: int | None = None  # how often the ranks had joined before the first step
        self._exchanges: list[tuple[Handle, Sequence[str]]] = []  # with the labels of the variables

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to check."""
        return self._step > _EXCHANGES

    def observer(self, variables: Sequence[Variable], labels: Sequence[str], may_read: bool = True) -> Observer | None:
        """What to call with this rank's gradients before they are reduced; None if there is nothing to check.

        It raises MismatchError, on every rank, when the ranks train different weights.

        Args:
            variables: Those whose gradients are reduced.
            labels: What users call them.
            may_read: Whether no variable changes before its gradient is reduced. Otherwise weights are not compared.
        """
        if self.is_done or runtime.current().settings.consistency_check_disable:
            return None
        return partial(self._observe, [weakref.ref(v) for v in variables] if may_read else [], labels)

    def conclude(self) -> None:
        """Decide now, if an epoch ends after two or three steps. All ranks call it, after as many reductions.

        Raises:
            MismatchError: On every rank, when the ranks train different weights.
        """
        if not self._has_joined:
            self._require_equal_weights()
            self._warn_of_equal_data()

    def _observe(self, variables: Sequence["weakref.ref[Variable]"], labels: Sequence[str],
                 gradients: Sequence[np.ndarray]) -> bool:
        if self.is_paused:
            return True
        if self._joins is None:
            self._joins = self._group.joins
        if self._has_joined:
            self._step = _EXCHANGES + 1  # The ranks have made different numbers of steps.
        if self.is_done:
            return False
        self._step += 1
        if self._step > _EXCHANGES:
            self._warn_of_equal_data()
            self._exchanges.clear()
            return False
        if self._step == 3:
            self._require_equal_weights()
        digests = [_digest_of(gradients)]
        if variables and (self._step == 1 or (self._step == 2 and differing(self._received(0)))):
            found = [each for each in (variable() for variable in variables) if each is not None]
            digests += digests_of_weights(found) if len(found) == len(variables) else []
        self._exchanges.append((_send(self._group, self._name, digests), labels))
        return True

    @property
    def _group(self) -> Group:
        return self._process_set.group(self._name)

    @property
    def _has_joined(self) -> bool:
        """Whether the ranks have joined since the first step."""
        return self._joins is not None and self._group.joins != self._joins

    def _require_equal_weights(self) -> None:
        """Raise MismatchError if the weights differed with the first two reductions."""
        received = self._received(1)
        if differing(self._received(0)) and differing(received):
            _, labels = self._exchanges[1]
            raise MismatchError(describe_weights(labels, received, self._group.topology.job_ranks))

    def _warn_of_equal_data(self) -> None:
        received = [self._received(number) for number in range(len(self._exchanges))]
        if self._group.topology.rank == 0 and is_same_data(received):
            warn_of_equal_data("their gradients had the same bits in the first steps")

    def _received(self, number: int) -> list[Digests]:
        """The digests of all ranks in one exchange; [] if they are not known, or a rank had joined."""
        if number >= len(self._exchanges):
            return []
        try:
            rows, = self._exchanges[number][0].wait(_WAIT_S)
        except (TimeoutError, CollectiveError):  # An error of the engine is raised by the reduction too.
            return []
        digests = by_rank(rows)
        return digests if len(digests) == self._group.topology.size else []


def warn_of_equal_data(why: str) -> None:
    """Warn once in this process that all ranks train on the same data, and say how that is known. Local."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning("mpistrat: all ranks train on the same data: %s. Give each rank its own rows: "
                       "x, y = hvd.shard(x, y).", why)


def differing(digests: Sequence[Digests]) -> list[int]:
    """The numbers of the variables that are not the same on all ranks; [] if the ranks cannot be compared."""
    if len({len(of_rank) for of_rank in digests}) != 1:
        return []
    return [i - 1 for i in range(1, len(digests[0])) if len({of_rank[i] for of_rank in digests}) > 1]


def is_same_data(received: Sequence[Sequence[Digests]]) -> bool:
    """Whether the gradients were the same on all ranks in at least two reductions, and never different.

    Reductions of different weights do not count.

    Args:
        received: The digests of all ranks in each reduction; [] where they are not known.
    """
    counted = [digests for digests in received if digests]
    while counted and differing(counted[0]):
        counted = counted[1:]
    gradients = [{of_rank[0] for of_rank in digests} for digests in counted]
    return len(gradients) >= 2 and all(len(found) == 1 and _NOTHING not in found for found in gradients)


def describe_differing(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """Which variables differ, and among which ranks. At least one does.

    Args:
        labels: What users call the variables.
        digests: Of each rank.
        ranks_of: The rank of each in the job; (): in order.
    """
    different = differing(digests)
    groups: dict[bytes, list[int]] = {}
    for rank, of_rank in enumerate(digests):
        groups.setdefault(of_rank[1 + different[0]], []).append(ranks_of[rank] if ranks_of else rank)
    listed = [rank_list(ranks) for ranks in groups.values()]
    more = f"; and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    where = "; ".join(listed[:MOST_LISTED]) + more
    more = f" So do {len(different) - 1} more of {len(labels)} variables." if len(different) > 1 else ""
    return f"the values of {labels[different[0]]} differ among ranks {where}.{more}"


def describe_weights(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """The error of ranks that train different weights. The arguments are those of describe_differing."""
    return (f"the ranks train different weights: {describe_differing(labels, digests, ranks_of)}"
            " Broadcast them before training: add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks "
            "of fit, or call hvd.broadcast_variables(model.weights, root_rank=0) before a loop of your own. A "
            "variable that each rank has for itself is exempt with register_local_var (of the optimizer) or "
            "register_local_source (of the tape). MPISTRAT_CONSISTENCY_CHECK_DISABLE=1 leaves out this check.")


def by_rank(rows: np.ndarray) -> list[Digests]:
    """The digests of each rank, from the gathered rows, which begin with their rank."""
    found: dict[int, Digests] = {}
    for row in rows:
        found.setdefault(int.from_bytes(row[:_RANK_BYTES].tobytes(), "little"), []).append(row[_RANK_BYTES:].tobytes())
    return [found[rank] for rank in sorted(found)]


def _send(group: Group, name: str, digests: Digests) -> Handle:
    """Begin to gather the digests of all ranks. Collective; returns at once."""
    head = group.topology.rank.to_bytes(_RANK_BYTES, "little")
    rows = np.frombuffer(b"".join(head + digest for digest in digests), np.uint8).reshape(len(digests), -1)
    # Several tapes may have one name. Their reductions come in the same order on all ranks.
    name = f"{name}/{executions.next_number(name)}"
    return group.engine.submit(allgather_request(name, specs_of([rows])), [rows])


def _digest_of(gradients: Sequence[np.ndarray]) -> bytes:
    says_something = any(np.any(g) for g in gradients) and all(np.all(np.isfinite(g)) for g in gradients)
    return _digest(gradients) if says_something else _NOTHING


def digests_of_weights(variables: Sequence[Variable]) -> Digests:
    """The digest of each variable's value, read at once."""
    with SynchronousExecution():
        return [_digest([tf.convert_to_tensor(variable).numpy()]) for variable in variables]


def _digest(arrays: Sequence[np.ndarray]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for array in arrays:
        # By way of bytes: hashlib does not take bfloat16.
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()


_of_variables: dict[tuple[int, int, int], tuple["weakref.ref[Any]", FirstSteps]] = {}


def of_variables(variables: Sequence[Variable], name: str, process_set: ProcessSet = global_process_set) -> FirstSteps:
    """The FirstSteps of these variables, which lasts as long as the first of them.

    It is for tapes: eager code makes a tape for each step. Several tapes of one step, say those of an actor and a
    critic with one encoder, have variables in common, so the first variable is not enough to tell them apart.

    Args:
        variables: At least one.
        name: The name of a new FirstSteps.
        process_set: The ranks that reduce.
    """
    key = id(variables[0]), id(variables[-1]), len(variables)
    if key not in _of_variables:
        _of_variables[key] = weakref.ref(variables[0], lambda _: _of_variables.pop(key, None)), FirstSteps(
            name, process_set)
    return _of_variables[key][1]
