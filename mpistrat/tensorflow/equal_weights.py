"""Whether all ranks have the same weights, by digests that are compared in one all-reduce of 32 bytes. Collective.

fit calls it within epochs and at their end, elastic states in a commit, and MPIStrategy when training begins. A
difference is an error; after training has begun, MPISTRAT_CHECK_ACTION may make it a warning.
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
from .bridge.private_names import SynchronousExecution
from .bridge.types import Variable
from .consistency import describe_differing, differing
from .digests import digest_of
from .gradients import label_of
from .graph.cpu import to_array

logger = logging.getLogger(__name__)

# Ranks on different processors, or with other numbers of threads, may round differently, and atomic additions of a GPU
# have no fixed order. Differences up to this part of the largest absolute value count as rounding; in half precision
# that is 13 units of bfloat16.
_ROUNDING, _ROUNDING_OF_HALVES = 1e-4, 0.1

CAUSES = ("weights that were not broadcast before training; a callback, or a learning rate, on some ranks only; an "
          "optimizer of the model that is not a hvd.DistributedOptimizer; code that loads or assigns weights on some "
          "ranks only, without hvd.broadcast_variables(model.weights, root_rank=0) after it. Exempt a variable that is "
          "local to each rank with register_local_var of the optimizer.")

_has_warned = False


def require_equal_weights(variables: Sequence[Variable], name: str, place: str,
                          process_set: ProcessSet = global_process_set, suspects: str = "",
                          causes: str = CAUSES, action: str = "abort",
                          rates: tuple[bytes, Callable[[], None]] = (b"", lambda: None)) -> None:
    """Check that all ranks have the same values. Collective. CPU tensors are not copied.

    If the values differ by rounding only, the first rank logs a warning, once in this process.

    Args:
        variables: Keras variables or tf.Variables; the same number in the same order on all ranks.
        name: The beginning of the names of the collectives.
        place: The time of the check, for messages: "at the end of epoch 3".
        suspects: A sentence about probable causes in this training, for the message.
        causes: The usual causes and their remedies, for the message.
        action: "abort": a difference is an error. "warn": a difference is a warning of the first rank.
        rates: Other values that must be equal, as bytes, and a function, maybe collective, that all ranks call if not.

    Raises:
        MismatchError: On every rank, if values differ and `action` is "abort", or if their number or shapes differ.
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
        raise MismatchError(f"{problem} MPISTRAT_CHECK_ACTION=off switches this check off.")
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
    """Whether a weight has almost the same values on all ranks. All ranks get the same result. Collective."""
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
