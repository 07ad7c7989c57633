"""Checks that all ranks train equal weights on different data, or on equal datasets that MPIStrategy divides.

FirstSteps checks the first reductions of gradients. Optimizers, tapes, callbacks and fit use it. With each of these
reductions, a rank sends digests of its weights and of its local gradients, and does not wait for the digests of the
other ranks. The digests have arrived when a later reduction begins, because each rank sends digests before gradients.
Then each rank decides. All ranks decide the same, because they have the same digests. Whether a rank sends digests
depends only on the number of reductions, which is the same on all ranks.

- Weights that still differ after the first step are an error, which is raised before the third step. Before the first
  step weights may differ: models without an Input layer, and Horovod's examples, broadcast weights after that step.
- If gradients from equal weights have the same bits on all ranks in two steps, all ranks have the same batches, or a
  tape has already reduced the gradients that an optimizer reduces. The first rank warns, unless gradients of other
  variables differ: the generator of a GAN may get the same noise on all ranks, and the discriminator different images.
"""

import hashlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import is_

import numpy as np
import tensorflow as tf

from ..api import array_ops, runtime
from ..api.group import Group
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import CollectiveError, MismatchError
from ..core.handle import Handle
from ..core.request import Max, Min, allgather_request, specs_of
from ..core.rows import places_of_sample
from ..core.topology import MOST_LISTED, describe_by_rank, rank_list, ranks_by_value
from .async_op.submission import Observer
from .bridge.private_names import SynchronousExecution
from .bridge.types import Variable
from .graph.cpu import to_array
from .kerases import label_of

logger = logging.getLogger(__name__)

# -- digests of arrays ------------------------------------------------------------------------------------------------

# The array is divided into parts of 509 * 521 words of 64 bits. Each part has two tables of sums: over the words whose
# positions in the part are equal modulo 509, and modulo 521. These numbers are prime. So by the Chinese remainder
# theorem two words of a part have at most one sum in common. A change of one or two words, or a swap of two words,
# changes at least one sum. A swap of two blocks swaps many pairs of words: some sum changes, unless the block itself
# repeats after 509 words and the distance is a multiple of 521 words, or the reverse.

DIGEST_BYTES = 8
# A table stays in the first-level cache. 64 MB take 8.8 ms, 4.6 ms with one table of 509 sums for all of them, which
# does not see words that change places at a distance of 509. Parts of 256 KB, of 181 * 191 words, take 12 ms, since the
# tables are hashed. Hashes without an exception take longer: a sum of products with random numbers (Lemire and Kaser,
# "Strongly universal string hashing is fast", 2014) 13 ms, zlib's CRC 73 ms, and blake2b 210 ms.
_PERIODS = (509, 521)


def digest_of(array: np.ndarray) -> bytes:
    """Return eight bytes that depend on the dtype, the shape and the bits of an array of numbers."""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=DIGEST_BYTES)
    in_bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    words = in_bytes[:in_bytes.size // 8 * 8].view(np.uint64)
    part = _PERIODS[0] * _PERIODS[1]
    for start in range(0, words.size, part):
        found = words[start:start + part]
        if found.size < sum(_PERIODS):  # For small arrays a hash of all words is quicker.
            digest.update(found.data)
            break
        for period in _PERIODS:
            rows = found.size // period
            digest.update(np.add.reduce(found[:rows * period].reshape(rows, period), axis=0).data)
            digest.update(found[rows * period:].data)  # Empty, except in the last part.
    digest.update(in_bytes[words.size * 8:].data)
    return digest.digest()


# -- the first reductions ---------------------------------------------------------------------------------------------

_EXCHANGES = 3  # The number of reductions of the same variables with which digests are sent.
# Tapes send digests with their first 8 reductions, and with 8 more after 16, 32, 64 and so on: another training may
# follow. In a graph tapes send digests only before the first gap, which begins after 24 reductions.
_WINDOW = 8
_OF_GRAPHS = 24
_RANK_BYTES = 4
_NOTHING = bytes(DIGEST_BYTES)  # The digest of gradients that are all zero, or not finite, and so may well be equal.
# Digests of an earlier step have arrived, unless steps overlap. Then the check is left out.
_WAIT_S = 1.0

SHARD = "x, y = hvd.shard(x, y)"

# The digests of one rank: of its gradients, and then of each variable, if they were read.
Digests = list[bytes]

_has_warned = _has_warned_of_rounding = False  # In this process.
_all: "weakref.WeakSet[FirstSteps]" = weakref.WeakSet()


@dataclass
class _Exchange:
    """One exchange, among all ranks, of digests (hashes of weights and gradients). It belongs to one reduction."""

    # The index of the list of variables. It is the same on other ranks, unless their programs differ.
    index: int
    labels: Sequence[str]  # What users call the variables.
    handle: Handle  # The handle of the exchange, whose rows begin with the index.


class FirstSteps:
    """The checks of the first reductions of one optimizer, or of all tapes of one thread in a process set.

    `name`: The name of the optimizer; for tapes "tape", with a prefix in threads other than the main thread. Reductions
    of different lists of variables are checked separately, because a step may use several tapes. `way_out`: The code
    that the warning recommends, by which each rank gets different data.
    """

    def __init__(self, name: str, process_set: ProcessSet = global_process_set, is_of_tapes: bool = False,
                 way_out: str = SHARD):
        # is_paused: The weights are going to be broadcast, and reductions before that do not count.
        # is_done: There is nothing left to check.
        self.is_paused = self.is_done = False
        # Returns the digest of each variable's value, or nothing if the values are not known.
        self.digests_of: Callable[[Sequence[Variable]], Digests] = digests_of_weights
        self._purpose, self._name = name, f"check/{name}"
        self._process_set, self._is_of_tapes, self._way_out = process_set, is_of_tapes, way_out
        self._count = 0  # The number of reductions so far.
        self._joins: int | None = None  # How often the ranks had joined before the first step.
        self._exchanges: list[_Exchange] = []
        self._lists: list[Sequence[weakref.ref[Variable]]] = []  # The variables of each index.
        self._differed: set[int] = set()  # The indices where gradients of the same weights differed among the ranks.
        _all.add(self)

    def observer(self, variables: Sequence[Variable], labels: Sequence[str], may_read: bool = True) -> Observer | None:
        """Return a function to call with this rank's gradients before their reduction; None if there is no check.

        The function raises MismatchError, on every rank, if the ranks train different weights. `may_read`: Whether the
        function may read the variables to compare them. It must not if a variable may change before the reduction.
        """
        if self.is_done or not runtime.current().settings.is_checked:
            return None
        in_graph = not tf.executing_eagerly()
        if self._is_of_tapes and not in_graph and not _is_due(self._count):
            self._count += 1
            return None
        return partial(self._observe, [weakref.ref(v) for v in variables], labels, may_read, in_graph)

    def conclude(self) -> None:
        """Do the checks now, not in a later reduction: for the end of an epoch with only two or three steps.

        Call on all ranks after the same number of reductions. Raises MismatchError on all ranks: The weights differ.
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
        head = self._group.topology.rank.to_bytes(_RANK_BYTES, "little")
        rows = np.frombuffer(b"".join(head + row for row in (index.to_bytes(DIGEST_BYTES, "little"), *digests)),
                             np.uint8).reshape(1 + len(digests), -1)
        handle = self._group.engine.submit(allgather_request(f"{self._name}/{self._count}", specs_of([rows])), [rows])
        self._exchanges.append(_Exchange(index, labels, handle))
        self._count += 1
        return True

    def _end(self) -> None:
        self.is_done = True
        self._exchanges.clear()

    def _index_of(self, variables: Sequence["weakref.ref[Variable]"]) -> int:
        """Return the index of this list of variables, in the order in which lists were first reduced."""
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
        """Raise MismatchError if the latest list of variables differed among the ranks in its first two reductions."""
        latest = self._exchanges[-1:]
        same = self._of_list(latest[0].index) if latest else []
        if len(same) != 2:
            return
        received = {id(exchange): self._received(exchange) for exchange in self._exchanges}
        # Another rank may have other indices before. Then it does not come here with the same two exchanges.
        if all(received.values()) and all(differing(received[id(exchange)]) for exchange in same):
            raise MismatchError(describe_weights(same[1].labels, received[id(same[1])], self._group.topology.job_ranks))

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
                       "Keep only one: apply the tape's gradients with an optimizer that is not distributed.")
        elif not apart:
            warn_of_equal_data("their gradients had the same bits in the first steps", self._way_out)

    def _lists_that_differ(self) -> list[int]:
        return [index for index in range(len(self._lists)) if index in self._differed
                or has_other_data([self._received(each, 0.0) for each in self._of_list(index)])]

    def _received(self, exchange: _Exchange, wait_s: float = _WAIT_S) -> list[Digests]:
        """Return all ranks' digests; [] if some are missing, as after a join(), or are for other variables."""
        try:
            rows, = exchange.handle.wait(wait_s)
        except (TimeoutError, CollectiveError):  # An error of the engine is raised by the reduction too.
            return []
        found = by_rank(rows)
        is_complete = len(found) == self._group.topology.size and len({index for index, *_ in found}) == 1
        return [digests for _, *digests in found] if is_complete else []


def warn_of_equal_data(why: str, way_out: str = SHARD) -> None:
    """Warn once in this process that all ranks train on the same data. `why`: How this is known. Local."""
    _warn_once(f"all ranks train on the same data: {why}. Give each rank its own rows: {way_out}.")


def _warn_once(sentence: str) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        logger.warning("mpistrat: %s", sentence)


def differing(digests: Sequence[Digests]) -> list[int]:
    """Return the indices of the variables that differ among the ranks; [] if some ranks have fewer digests."""
    if len({len(of_rank) for of_rank in digests}) != 1:
        return []
    return [i - 1 for i in range(1, len(digests[0])) if len({of_rank[i] for of_rank in digests}) > 1]


def is_same_data(received: Sequence[Sequence[Digests]]) -> bool:
    """Return whether the gradients were the same on all ranks in at least two reductions, and never different.

    Reductions from different weights do not count. `received`: For each reduction the ranks' digests; [] if unknown.
    """
    gradients = _gradients(received)
    return len(gradients) >= 2 and all(len(found) == 1 and _NOTHING not in found for found in gradients)


def has_other_data(received: Sequence[Sequence[Digests]]) -> bool:
    """Return whether gradients from equal weights differed among the ranks. `received`: As for is_same_data."""
    return any(len(found) > 1 for found in _gradients(received))


def _gradients(received: Sequence[Sequence[Digests]]) -> list[set[bytes]]:
    """Return, for each reduction from equal weights, the set of the ranks' digests of gradients."""
    counted = [digests for digests in received if digests]
    while counted and differing(counted[0]):
        counted = counted[1:]
    return [{of_rank[0] for of_rank in digests} for digests in counted]


def describe_differing(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """Return a text that says which variables differ, and among which ranks. At least one variable must differ.

    `ranks_of`: The rank in the job for each element of `digests`; () means 0, 1, 2 and so on.
    """
    different = differing(digests)
    groups = ranks_by_value(of_rank[1 + different[0]] for of_rank in digests).values()
    listed = [rank_list(ranks_of[rank] if ranks_of else rank for rank in ranks) for ranks in groups]
    more = f" and {len(listed) - MOST_LISTED} more groups" if len(listed) > MOST_LISTED else ""
    where = (" and " if len(listed) == 2 else ", ").join(listed[:MOST_LISTED]) + more
    more = f" The same holds for {len(different) - 1} more of {len(labels)} variables." if len(different) > 1 else ""
    return f"the values of {labels[different[0]]} differ between ranks {where}.{more}"


def describe_weights(labels: Sequence[str], digests: Sequence[Digests], ranks_of: Sequence[int] = ()) -> str:
    """Return the text of the error for ranks that train different weights. Arguments as for describe_differing."""
    return (f"the ranks train different weights: {describe_differing(labels, digests, ranks_of)}"
            " Broadcast the weights before training: add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the "
            "callbacks of fit, or call hvd.broadcast_variables(model.weights, root_rank=0) before a loop of your own; "
            "in a session add hvd.BroadcastGlobalVariablesHook(0), or run hvd.broadcast_global_variables(0). If a "
            "variable is meant to differ between ranks, pass it to register_local_var (of the optimizer) or "
            "register_local_source (of the tape). If each rank changes the weights on purpose before the gradient, as "
            "in MAML, pass check_weights=False to DistributedGradientTape or DistributedOptimizer. "
            "MPISTRAT_CHECK_ACTION=off switches this check off.")


def by_rank(rows: np.ndarray) -> list[Digests]:
    """Return the digests of each rank. `rows`: The gathered rows, each of which begins with the number of its rank."""
    found: dict[int, Digests] = {}
    for row in rows:
        found.setdefault(int.from_bytes(row[:_RANK_BYTES].tobytes(), "little"), []).append(row[_RANK_BYTES:].tobytes())
    return [found[rank] for rank in sorted(found)]


def _digest_of(gradients: Sequence[np.ndarray]) -> bytes:
    says_something = any(np.any(g) for g in gradients) and all(np.all(np.isfinite(g)) for g in gradients)
    if not says_something:
        return _NOTHING
    return hashlib.blake2b(b"".join(map(digest_of, gradients)), digest_size=DIGEST_BYTES).digest()


def digests_of_weights(variables: Sequence[Variable]) -> Digests:
    """Return the digest of each variable's current value. Values in CPU memory are not copied."""
    with SynchronousExecution():
        return [digest_of(to_array(tf.convert_to_tensor(variable))) for variable in variables]


def _is_due(count: int) -> bool:
    """Return whether tapes send digests with this reduction. `count`: The number of reductions before it."""
    return count < _WINDOW or count - (1 << (count.bit_length() - 1)) < _WINDOW


_of_tapes: "weakref.WeakKeyDictionary[Group, dict[str, FirstSteps]]" = weakref.WeakKeyDictionary()


def of_tapes(name: str, process_set: ProcessSet) -> FirstSteps:
    """Return the FirstSteps called `name`, which many tapes share, because eager code makes a new tape in each step."""
    known = _of_tapes.setdefault(process_set.group(name), {})
    if name not in known:
        known[name] = FirstSteps(name, process_set, is_of_tapes=True)
    return known[name]


_readers: dict[int, tuple["weakref.ref[Variable]", str]] = {}


def read_alone(variables: Sequence[Variable], reader: str) -> list[Variable]:
    """Return those of `variables` that no other `reader` (an optimizer's name) has passed to this function. Local.

    In a graph only the first reader may read a variable. Otherwise a callback could read it for one optimizer before or
    after a change by another optimizer in the same step, because nothing orders the two.
    """
    for variable in variables:
        key = id(variable)
        if key not in _readers:
            # Called when the variable is deleted: _readers.pop(key, the reference).
            _readers[key] = weakref.ref(variable, partial(_readers.pop, key)), reader
    return [variable for variable in variables if _readers[id(variable)][1] == reader]


class ReadingObserver:
    """Calls `observer`, which checks a collective in the graph of a session, and reads the weights for the check.

    A callback in a graph cannot read variables of a session. So a separate run of the session reads the weights before
    each run with the collective, and fills the list `digests`. The list stays empty as long as a variable has no value.
    """

    def __init__(self, observer: Observer, digests: Digests, variables: Sequence[Variable]):
        self._observer, self._digests = observer, digests
        self._variables = list(map(weakref.ref, variables))  # They have the graph, which keeps this.

    def before_run(self, session: tf.compat.v1.Session) -> None:
        """Read the weights in a separate run. Called before each run that contains the collective."""
        self._digests.clear()
        found = [variable for variable in (reference() for reference in self._variables) if variable is not None]
        with suppress(tf.errors.FailedPreconditionError):  # A variable has no value yet.
            self._digests[:] = [digest_of(np.asarray(value)) for value in session.run(found)]

    def __call__(self, arrays: Sequence[np.ndarray], thread: str) -> bool:
        return self._observer(arrays, thread)


# -- all weights, at any time -----------------------------------------------------------------------------------------

# Ranks on different processors, or with other numbers of threads, may round differently, and atomic additions of a GPU
# have no fixed order. Differences up to this part of the largest absolute value count as rounding; in half precision
# that is 13 units of bfloat16.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-4, 0.1

CAUSES = ("weights that were not broadcast before training; a callback that only some ranks have; learning rates that "
          "differ between ranks; an optimizer of the model that is not a hvd.DistributedOptimizer; code that loads or "
          "assigns weights on some ranks only, without hvd.broadcast_variables(model.weights, root_rank=0) after it. "
          "If a variable is meant to differ between ranks, pass it to register_local_var of the optimizer.")


def require_equal_weights(variables: Sequence[Variable], name: str, place: str,
                          process_set: ProcessSet = global_process_set, suspects: str = "",
                          causes: str = CAUSES, action: str = "abort",
                          rates: tuple[bytes, Callable[[], None]] = (b"", lambda: None)) -> None:
    """Check that variables have the same values on all ranks. Collective. Values in CPU memory are not copied.

    If values differ only by rounding, there is no error; the first rank logs a warning, once in its process.

    Args:
        variables: Keras variables or tf.Variables; the same number in the same order on all ranks.
        name: The beginning of the names of the collectives.
        place: The time of the check, for messages: "at the end of epoch 3".
        suspects, causes: Texts for the message: probable causes in this training, and usual causes with remedies.
        action: "abort": a difference is an error. "warn": the first rank logs a warning about a difference.
        rates: Optimizers' numbers, such as learning rates, as bytes; and a function that all ranks call if they differ.

    Raises:
        MismatchError: On all ranks, if values differ and `action` is "abort", or if the number or shapes differ.
    """
    global _has_warned_of_rounding
    with SynchronousExecution():
        arrays = [to_array(tf.convert_to_tensor(variable)) for variable in variables]
    finite = process_set.group(name).finite
    if finite is not None:
        finite.conclude(arrays)
    own = [digest_of(array) for array in arrays]
    totals = np.array([int.from_bytes(hashlib.blake2b(each, digest_size=7).digest(), "little")
                       for each in (b"".join(own), rates[0])])
    lowest = array_ops.allreduce(np.concatenate([totals, -totals]), op=Min, name=f"{name}/digest",
                                 process_set=process_set)
    has_same_weights, has_same_rates = lowest[:2] == -lowest[2:]
    if not has_same_rates:
        rates[1]()
    if has_same_weights:
        return
    of_ranks = array_ops.allgather_object((own, [(a.shape, str(a.dtype)) for a in arrays]), f"{name}/digests",
                                          process_set)
    counts = [len(digests) for digests, _ in of_ranks]
    if len(set(counts)) > 1:
        raise MismatchError(f"{place} the ranks' models have different numbers of weights: {describe_by_rank(counts)}. "
                            "Build the same model on all ranks.")
    digests = [[b"", *digests] for digests, _ in of_ranks]
    where = describe_differing([label_of(v) for v in variables], digests, process_set.group(name).topology.job_ranks)
    have_same_shapes = all(shapes == of_ranks[0][1] for _, shapes in of_ranks)
    if have_same_shapes and all(_differs_by_rounding(arrays[number], f"{name}/spread", process_set)
                                for number in differing(digests)):
        if not _has_warned_of_rounding and process_set.rank() == 0:
            logger.warning("mpistrat: %s the weights of the ranks differ by rounding: %s Their processors or GPUs "
                           "round differently, or their numbers of threads differ (TF_NUM_INTRAOP_THREADS), "
                           "or an operation on the averaged gradients adds in no fixed order. Training goes on; "
                           "larger differences are an error.", place, where)
        _has_warned_of_rounding = True
        return
    problem = f"{place} the ranks have different weights, so they no longer train one model: {where} " \
        f"{suspects}{' ' if suspects else ''}Usual causes: {causes}"
    if action == "abort" or not have_same_shapes:
        raise MismatchError(f"{problem} MPISTRAT_CHECK_ACTION=off switches this check off.")
    if process_set.rank() == 0:
        logger.warning("mpistrat: %s Training goes on with different weights, because MPISTRAT_CHECK_ACTION is warn.",
                       problem)


def _differs_by_rounding(array: np.ndarray, name: str, process_set: ProcessSet) -> bool:
    """Return whether a weight differs among the ranks only by rounding. All ranks get the same result. Collective."""
    if array.dtype.kind in "iubc":
        return False
    is_half = array.dtype.itemsize <= 2
    # A value that is NaN on some ranks only is not rounding.
    values = np.where(np.isnan(array), np.inf, array).astype(np.float32 if is_half else array.dtype)
    lowest = array_ops.allreduce(values, op=Min, name=f"{name}/lowest", process_set=process_set)
    highest = array_ops.allreduce(values, op=Max, name=f"{name}/highest", process_set=process_set)
    largest = np.max(np.maximum(np.abs(lowest), np.abs(highest)))
    tolerance = _ROUNDING_OF_HALVES if is_half else _ROUNDING
    return bool(np.isfinite(largest) and np.max(highest - lowest) <= tolerance * largest)


# -- whether the datasets of all ranks are made of the same data ------------------------------------------------------

# MPIStrategy shards a dataset, so all ranks must have the same. Datasets are compared by the arguments of their
# transformations: arrays, shards, counts and seeds. No element is read. The results of generators and of Python
# functions are not compared. Local; the caller exchanges the arguments.

ADVICE = ("MPIStrategy shards a dataset itself: each rank takes its part of every global batch. With different data "
          "on the ranks, rows are left out or trained on twice. Pass the same data in the same order on all ranks, "
          "without hvd.shard, dataset.shard or slices by rank; n in batch(n) is the size of the global batch. If each "
          "rank must read different data, use strategy.distribute_datasets_from_function.")
# The arguments of some datasets: shard, take and skip, repeat, batch, shuffle.
_NUMBERS = ("_num_shards", "_index", "_count", "_batch_size", "_seed", "_seed2")


def sources_of(dataset: tf.data.Dataset) -> list[str]:
    """Return the arguments with which a dataset and its input datasets were made, in a deterministic order."""
    numbers = [f"{name.strip('_')}={getattr(dataset, name).numpy()}" for name in _NUMBERS
               if hasattr(getattr(dataset, name, None), "numpy")]
    arrays = [array for array in getattr(dataset, "_tensors", ()) if tf.is_tensor(array)]
    own = [getattr(dataset, "_mpistrat_part", ""),  # Set by shard().
           f"{type(dataset).__name__.strip('_')}({', '.join(numbers)})" if numbers else "",
           f"arrays of {_described(arrays)}" if arrays else ""]
    return [each for each in own if each] + [each for other in dataset._inputs() for each in sources_of(other)]


def difference(of_ranks: Sequence[Sequence[str]]) -> str:
    """Return a text with the first difference among the ranks' results of sources_of; "" if there is none."""
    for values in itertools.zip_longest(*of_ranks, fillvalue="nothing"):
        if len(set(values)) > 1:
            return describe_by_rank(values)
    return ""


def _described(arrays: Iterable[tf.Tensor]) -> str:
    """Return a text with the shapes of arrays, and with one digest of evenly spaced rows of the arrays."""
    digest = hashlib.blake2b(digest_size=4)
    for array in arrays:
        if array.dtype in (tf.variant, tf.resource) or not hasattr(array, "numpy"):
            continue
        rows = some_rows(array) if array.shape.rank and array.shape[0] else array.numpy()
        parts = np.ravel(np.asarray(rows, dtype=object)).tolist() if array.dtype == tf.string else \
            [np.ascontiguousarray(rows).tobytes()]
        for part in parts:
            digest.update(part)
    return f"shape {', '.join(str(tuple(array.shape)) for array in arrays)}, checksum of the rows {digest.hexdigest()}"


def some_rows(array: np.ndarray | tf.Tensor) -> np.ndarray:
    itemsize = array.itemsize if isinstance(array, np.ndarray) else max(array.dtype.size, 1)
    places = places_of_sample(len(array), int(np.prod(array.shape[1:])) * itemsize)
    return array[places] if isinstance(array, np.ndarray) else tf.gather(array, places).numpy()
