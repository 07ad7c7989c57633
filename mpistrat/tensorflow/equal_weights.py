"""Whether all ranks have the same weights, by digests that are compared in one all-reduce of 32 bytes. Collective.

fit calls it within epochs and when they end, elastic states in a commit, and MPIStrategy when training begins. A
difference is an error; once training has begun MPISTRAT_CHECK_ACTION may say otherwise.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from ..api import array_ops
from ..api.process_sets import ProcessSet, global_process_set
from ..core.errors import MismatchError
from ..core.request import Max, Min
from ..core.topology import describe_by_rank
from .bridge.sync_execution import SynchronousExecution
from .bridge.types import Variable
from .consistency import describe_differing, differing
from .digests import digest_of
from .gradients import label_of
from .graph.cpu import to_array

logger = logging.getLogger(__name__)

# Ranks on different processors, or with other numbers of threads, may round differently, and atomic additions of a GPU
# have no fixed order. Differences of this part of the largest absolute value are taken for that; in half precision it
# is 13 units of bfloat16.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-4, 0.1

CAUSES = ("weights that were not broadcast before training; a callback, or a learning rate, on some ranks only; an "
          "optimizer of the model that is no hvd.DistributedOptimizer; code that loads or assigns weights on some "
          "ranks only, without hvd.broadcast_variables(model.weights, root_rank=0) after it. A variable that each "
          "rank has for itself is exempt with register_local_var of the optimizer.")

_has_warned = False


def require_equal_weights(variables: Sequence[Variable], name: str, place: str,
                          process_set: ProcessSet = global_process_set, suspects: str = "",
                          causes: str = CAUSES, action: str = "abort",
                          rates: tuple[bytes, Callable[[], None]] = (b"", lambda: None)) -> None:
    """Check that all ranks have the same values. Collective. It copies no CPU tensor.

    If the values differ by rounding only, the first rank logs a warning, once in this process.

    Args:
        variables: Keras variables or tf.Variables; on all ranks as many, in the same order.
        name: Begins the names of the collectives.
        place: When this is, for messages: "at the end of epoch 3".
        suspects: A sentence on what may be the cause in this training, for the message.
        causes: The usual causes, and the way out.
        action: What a difference is. "abort": an error. "warn": a warning of the first rank.
        rates: Other values that must be equal, as bytes, and what all ranks call if they are not. It may be collective.

    Raises:
        MismatchError: On every rank, when values differ and the action is "abort", or their number or shapes differ.
    """
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
        _warn_of_rounding(place, where, process_set)
        return
    problem = f"{place} the ranks have different weights, so they no longer train one model: {where} " \
        f"{suspects}{' ' if suspects else ''}Usual causes: {causes}"
    if action == "abort" or not have_same_shapes:
        raise MismatchError(f"{problem} MPISTRAT_CHECK_ACTION=off leaves out this check.")
    if process_set.rank() == 0:
        logger.warning("mpistrat: %s Training goes on with them, because MPISTRAT_CHECK_ACTION is warn.", problem)


def _warn_of_rounding(place: str, where: str, process_set: ProcessSet) -> None:
    global _has_warned
    if not _has_warned and process_set.rank() == 0:
        logger.warning("mpistrat: %s the weights of the ranks differ by rounding: %s Their processors or GPUs round "
                       "differently, or they have other numbers of threads (TF_NUM_INTRAOP_THREADS), or an operation "
                       "on the averaged gradients adds in no fixed order. Training goes on; larger differences are an "
                       "error.", place, where)
    _has_warned = True


def _differs_by_rounding(array: np.ndarray, name: str, process_set: ProcessSet) -> bool:
    """Whether a weight has almost the same values on all ranks. The same result on all of them. Collective."""
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
