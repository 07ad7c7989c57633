"""Whether the ranks' datasets are made of the same data. MPIStrategy shards a dataset, so all ranks must have the same.

Datasets are compared by the arguments of their transformations: arrays, shards, counts and seeds. No element is read.
The results of generators and of Python functions are not compared. Local; the caller exchanges the arguments.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from ..core.rows import places_of_sample
from ..core.topology import describe_by_rank

ADVICE = ("MPIStrategy shards a dataset itself: each rank takes its part of every global batch, so rows are left out "
          "or trained on twice. Pass the same data in the same order on all ranks, without hvd.shard, dataset.shard or "
          "slices by rank; batch(...) is the size of the global batch. If each rank must read different data, use "
          "strategy.distribute_datasets_from_function.")


# The arguments of some datasets: shard, take and skip, repeat, shuffle.
_NUMBERS = ("_num_shards", "_index", "_count", "_seed", "_seed2")


def sources_of(dataset: tf.data.Dataset) -> list[str]:
    """The arguments that a dataset and its inputs were made with, in an order that the program determines."""
    numbers = [f"{name.strip('_')}={getattr(dataset, name).numpy()}" for name in _NUMBERS
               if hasattr(getattr(dataset, name, None), "numpy")]
    arrays = [array for array in getattr(dataset, "_tensors", ()) if tf.is_tensor(array)]
    own = [getattr(dataset, "_mpistrat_part", ""),  # Set by shard().
           f"{type(dataset).__name__.strip('_')}({', '.join(numbers)})" if numbers else "",
           f"arrays of {_described(arrays)}" if arrays else ""]
    return [each for each in own if each] + [each for other in dataset._inputs() for each in sources_of(other)]


def difference(of_ranks: Sequence[Sequence[str]]) -> str:
    """The first difference between the sources of the ranks; "" if there is none."""
    for values in itertools.zip_longest(*of_ranks, fillvalue="nothing more"):
        if len(set(values)) > 1:
            return describe_by_rank(values)
    return ""


def _described(arrays: Iterable[tf.Tensor]) -> str:
    """The shapes of arrays, and a digest of rows at equal distances."""
    digest = hashlib.blake2b(digest_size=4)
    for array in arrays:
        for part in _bytes_of(array):
            digest.update(part)
    return f"shape {', '.join(str(tuple(array.shape)) for array in arrays)}, checksum of the rows {digest.hexdigest()}"


def _bytes_of(array: tf.Tensor) -> Iterator[bytes]:
    if array.dtype in (tf.variant, tf.resource) or not hasattr(array, "numpy"):
        return
    rows = some_rows(array) if array.shape.rank and array.shape[0] else array.numpy()
    if array.dtype == tf.string:
        yield from np.ravel(np.asarray(rows, dtype=object)).tolist()
    else:
        yield np.ascontiguousarray(rows).tobytes()


def some_rows(array: np.ndarray | tf.Tensor) -> np.ndarray:
    itemsize = array.itemsize if isinstance(array, np.ndarray) else max(array.dtype.size, 1)
    places = places_of_sample(len(array), int(np.prod(array.shape[1:])) * itemsize)
    return array[places] if isinstance(array, np.ndarray) else tf.gather(array, places).numpy()
