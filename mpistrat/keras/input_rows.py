"""What fit gets: a digest of rows, to find ranks that train on the same arrays, and the order of a dataset.

Called by fit_callbacks.py; local.
"""

import hashlib
import logging
from typing import Any

import numpy as np
import tensorflow as tf

from ..api.sharding import OWN_ORDER, is_sharded_in_own_order
from ..core.rows import places_of_sample

logger = logging.getLogger(__name__)

_DIGEST_BYTES = 8


def digest_of_rows(inputs: Any) -> bytes:
    """A digest of the shapes, and of rows at equal distances; b"" unless all inputs are arrays or tensors of numbers.

    Args:
        inputs: What fit got as x and y: arrays in any structure. None is left out.
    """
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    arrays = [each for each in tf.nest.flatten(inputs) if each is not None]
    for array in arrays:
        if not isinstance(array, np.ndarray | tf.Tensor) or not array.ndim or not len(array):
            return b""
        rows = _some_rows(array)
        if rows.dtype.hasobject:
            return b""
        digest.update(f"{tuple(array.shape)} {rows.dtype}".encode())
        # By way of bytes: hashlib does not take bfloat16.
        digest.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return digest.digest() if arrays else b""


def warn_of_own_order(inputs: object) -> None:
    """Warn of a dataset that is sharded after a shuffle without a seed.

    Args:
        inputs: As in digest_of_rows.
    """
    if any(map(is_sharded_in_own_order, tf.nest.flatten(inputs))):
        logger.warning("mpistrat: fit got a dataset that each rank shuffles in an order of its own before it takes its "
                       "shard, so rows are read by several ranks or by none. %s", OWN_ORDER)


def _some_rows(array: np.ndarray | tf.Tensor) -> np.ndarray:
    size = int(np.prod(array.shape[1:])) * (array.itemsize if isinstance(array, np.ndarray) else array.dtype.size)
    places = places_of_sample(len(array), size)
    return array[places] if isinstance(array, np.ndarray) else tf.gather(array, places).numpy()
