"""A hint where a function calls allreduce for each of many small tensors: one call for all of them is much faster.

Such calls do not share their nodes by themselves. The first call returns before TensorFlow has traced the second, so
they could only share if the first tensor was submitted together with the last. A program in which something between
the calls waits for the first result, in a way that the graph does not show, would wait for ever: a callback that waits
for a message, which another rank sends when it has that result. The list that the user passes says that nothing does.

Called while TensorFlow traces.
"""

import logging
import weakref
from collections import Counter

import tensorflow as tf

from ..core.tuning import JOINED_TENSOR_BYTES
from .bridge.program_order import current_function
from .lists import topology_of

logger = logging.getLogger(__name__)

MANY = 32  # 400 calls take 25 ms, so fewer than 32 should take less than 2 ms.

_counts: "weakref.WeakKeyDictionary[tf.Graph, Counter[int]]" = weakref.WeakKeyDictionary()
_hints: list[str] = []  # The functions with a hint; one is enough.


def count(tensor: object, process_set: int) -> None:
    """Count a call of allreduce. For the last of MANY in one function the first rank logs the hint, once.

    Args:
        tensor: The argument of allreduce. It counts if it is dense and small.
        process_set: The id of the ranks that take part.
    """
    if tf.executing_eagerly() or not isinstance(tensor, tf.Tensor) or not _is_small(tensor):
        return
    function, topology = current_function(), topology_of(process_set)
    counts = _counts.setdefault(function, Counter())
    counts[process_set] += 1
    if counts[process_set] == MANY and topology.rank == 0 and topology.size > 1 and not _hints:
        _hints.append(function.name)
        logger.warning("mpistrat: %s() calls allreduce for each of %d small tensors or more. That takes much longer "
                       "than one call for all of them: results = hvd.grouped_allreduce([...]).", function.name, MANY)


def _is_small(tensor: tf.Tensor) -> bool:
    """Whether grouped_allreduce would pack the tensor together with others."""
    elements = tensor.shape.num_elements()
    return elements is not None and elements * tensor.dtype.size < JOINED_TENSOR_BYTES
