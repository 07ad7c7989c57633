"""shard: this rank's rows of arrays and datasets, the same number on every rank.

This module does not import the libraries of arrays, because a caller that passes an array has imported the library.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, SupportsInt, TypeGuard, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from ..core.errors import InvalidRequestError
from .group import Group
from .process_sets import ProcessSet, resolved

UNEVEN = ("drop", "pad")
# Results of tf.data.Dataset.cardinality() that are not a number of elements.
_INFINITE, _UNKNOWN = -1, -2


class _Rows(Protocol):
    """An object whose rows a slice or indices can select: an array, a tensor, a list, or a pandas object."""

    def __getitem__(self, rows: Any, /) -> Any: ...


class _Dataset(Protocol):
    """The methods of a tf.data.Dataset that this module calls."""

    element_spec: object
    _mpistrat_part: str

    def cardinality(self) -> SupportsInt: ...

    def shard(self, num_shards: int, index: int) -> "_Dataset": ...

    def take(self, count: int) -> "_Dataset": ...

    def skip(self, count: int) -> "_Dataset": ...

    def repeat(self) -> "_Dataset": ...

    def concatenate(self, dataset: "_Dataset") -> "_Dataset": ...

    def zip(self, datasets: object) -> "_Dataset": ...

    def window(self, size: int, *, drop_remainder: bool) -> "_Dataset": ...

    def flat_map(self, map_func: Callable[..., "_Dataset"]) -> "_Dataset": ...


def shard(*data: object, uneven: str = "drop", process_set: ProcessSet | None = None) -> Any:
    """Return this rank's rows of `data`. All ranks get the same number of rows, and so take the same number of steps.

        x, y = hvd.shard(x, y)

    Rank r of s gets the rows r, r + s, r + 2 s and so on. Local: nothing is sent, so all ranks must pass the same data
    in the same order. Shuffle after shard(), not before. `tf.data.Dataset.list_files` shuffles, unless you pass
    `shuffle=False`.

    Args:
        *data: Arrays with the same number of rows: numpy arrays, tensors, lists, pandas objects, or anything that has
            a length and can be sliced with a step. A numpy array is not copied; the result is a view. A dict of arrays
            gives a dict. A tf.data.Dataset must not be batched, because its elements are the rows. Each rank reads all
            elements and drops those of other ranks, so shard a list of file names, or shard before an expensive `map`.
            shard() adds 1 to 3 us for each element of the dataset. If the number of elements is unknown (a generator,
            records of files), shard() reads groups of s elements, and adds 20 to 70 us for each element.
            `dataset.apply(tf.data.experimental.assert_cardinality(n))` makes the number known.
        uneven: If the number of rows n is not a multiple of s, "drop" leaves out the last n % s rows, and "pad"
            repeats rows from the beginning. A rank that gets a repeated row gets a copy of a numpy array, not a view.
        process_set: The ranks that share the rows: r is this rank's index in the set, s its size. Default: all ranks.

    Returns:
        For one argument an array, a dict or a dataset; for several arguments a tuple of such results.

    Raises:
        InvalidRequestError: There are fewer rows than ranks, the arrays have different numbers of rows, an argument is
            no array or dataset, a dataset is shuffled without a seed, or this rank is not in the process set.
        NotInitializedError: Before init().
    """
    if uneven not in UNEVEN:
        raise InvalidRequestError(f'uneven must be "drop" or "pad". Received: {uneven!r}')
    if not data:
        raise InvalidRequestError("shard() takes at least one array or dataset.")
    group = resolved(process_set).group("shard()")
    topology = group.topology
    _check_counts(data, topology.size)
    arrays = [each for part in data for each in (part.values() if isinstance(part, Mapping) else [part])]
    _samples.setdefault(group, deque(maxlen=8)).extend(
        _sample(each) for each in arrays if isinstance(each, np.ndarray))
    _divided.add(group)
    parts = tuple(_part(argument, topology.rank, topology.size, uneven, _title(number))
                  for number, argument in enumerate(data))
    return parts if len(parts) > 1 else parts[0]


# The means of a few rows of each of the latest arrays that shard() divided among a group, and the groups that fit has
# not asked for. A new job has new groups.
_samples: "WeakKeyDictionary[Group, deque[tuple[float, ...]]]" = WeakKeyDictionary()
_divided: "WeakSet[Group]" = WeakSet()


def _sample(array: np.ndarray) -> tuple[float, ...]:
    if isinstance(array, np.ma.MaskedArray) or array.dtype.kind not in "biuf" or not array.size:
        return ()
    rows = array[np.linspace(0, len(array) - 1, min(len(array), 16)).astype(np.int64)]
    with np.errstate(all="ignore"):
        return tuple(rows.reshape(len(rows), -1).mean(1, dtype=np.float64).tolist())


def samples_of(process_set: ProcessSet) -> tuple[tuple[float, ...], ...]:
    """Return samples of the arrays that this rank has divided since the last call. Local."""
    return tuple(_samples.pop(process_set.group("samples_of()"), ()))


def take_divided(process_set: ProcessSet) -> bool:
    """Return whether this rank has called shard() since the last call. Local."""
    group = process_set.group("take_divided()")
    is_new = group in _divided
    _divided.discard(group)
    return is_new


def are_alike(of_ranks: Sequence[tuple[tuple[float, ...], ...]]) -> bool:
    """Return whether the ranks' samples_of are equal up to rounding, as far as all ranks have divided arrays."""
    return all(len(set(map(len, samples))) == 1 and np.allclose(samples, samples[0], 1e-3, 1e-6, equal_nan=True)
               for samples in zip(*of_ranks, strict=False))


def _title(number: int) -> str:
    return f"argument {number + 1} of shard()"


def _part(data: object, rank: int, size: int, uneven: str, title: str) -> object:
    if isinstance(data, Mapping):
        return {name: _part(array, rank, size, uneven, f"{title}, {name!r}") for name, array in data.items()}
    if _is_dataset(data):
        if size > 1 and is_in_own_order(data):
            raise InvalidRequestError(f"{title} is a dataset that is shuffled without a seed, so each rank has its own "
                                      f"order. Some rows would be read by several ranks, some by none. {OWN_ORDER}")
        own = _elements(data, rank, size, uneven)
        own._mpistrat_part = f"shard(): part {rank} of {size}"  # MPIStrategy warns if it shards such a dataset again.
        return own
    return _rows(cast("_Rows", data), rank, size, uneven, title)


# -- the number of rows -----------------------------------------------------------------------------------------------


def _check_counts(data: tuple[object, ...], size: int) -> None:
    """Raise InvalidRequestError unless all arrays have the same number of rows, and at least one for each rank."""
    counts: dict[str, int] = {}
    for number, argument in enumerate(data):
        title = _title(number)
        if isinstance(argument, Mapping):
            if not argument:
                raise InvalidRequestError(f"{title} is an empty {type(argument).__name__}.")
            counts |= {f"{title}, {name!r}": _count(array, f"{title}, {name!r}") for name, array in argument.items()}
        else:
            counts[title] = _count(argument, title)
    known = {title: count for title, count in counts.items() if count >= 0}
    if len(set(known.values())) > 1:
        listed = "; ".join(f"{count} in {title}" for title, count in known.items())
        raise InvalidRequestError(f"the data have different numbers of rows: {listed}.")
    if known and min(known.values()) < size:
        raise InvalidRequestError(f"{min(known.values())} rows are too few for {size} ranks: shard() gives each rank "
                                  "at least one.")


def _count(data: object, title: str) -> int:
    """Return the number of rows; _INFINITE or _UNKNOWN for a dataset without a known number. Errors name `title`."""
    if _is_dataset(data):
        return int(data.cardinality())
    if isinstance(data, tuple):
        raise InvalidRequestError(f"{title} is a tuple. Pass each array as a separate argument: shard(x, y), or "
                                  "shard(*data).")
    if data is None or isinstance(data, str | bytes):
        raise InvalidRequestError(f"{title} is {data!r:.80}, which has no rows. shard() takes arrays and datasets, not "
                                  "names of files.")
    try:
        shape = getattr(data, "shape", None)
        return int(len(cast("Sized", data)) if shape is None else shape[0])
    except (TypeError, ValueError, IndexError) as error:
        raise InvalidRequestError(f"{title} ({type(data).__name__}) has no known number of rows: {error}. shard() "
                                  "takes arrays that can be sliced, and tf.data.Dataset.") from error


# -- arrays -----------------------------------------------------------------------------------------------------------


def _rows(array: _Rows, rank: int, size: int, uneven: str, title: str) -> object:
    count = _count(array, title)
    own = range(rank, count if uneven == "pad" else count // size * size, size)
    wanted = -(-count // size) if uneven == "pad" else len(own)
    try:
        part = getattr(array, "iloc", array)[own.start:own.stop:size]  # pandas slices by position with iloc.
        if len(own) < wanted:
            part = _take(array, part, [*own, rank + size * len(own) - count])
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise InvalidRequestError(f"{title} ({type(array).__name__}) cannot be sliced as array[{own.start}:{own.stop}:"
                                  f"{size}]: {error}") from error
    if _count(part, title) != wanted:
        raise InvalidRequestError(f"{title} ({type(array).__name__}): array[{own.start}:{own.stop}:{size}] has "
                                  f"{_count(part, title)} rows instead of {wanted}.")
    return part


def _take(array: _Rows, part: object, rows: list[int]) -> object:
    """Return the rows of `array` at the indices `rows`. `part` already has all of these rows except the last row."""
    if hasattr(array, "iloc"):
        return array.iloc[rows]
    if isinstance(array, list):
        return [array[row] for row in rows]
    if type(array).__module__.partition(".")[0] == "tensorflow":
        return sys.modules["tensorflow"].gather(array, rows)
    if isinstance(part, np.ndarray) and not isinstance(array, np.ndarray):
        # A dataset of an HDF5 file accepts indices in ascending order only.
        return np.concatenate([part, array[rows[-1]:rows[-1] + 1]])
    return array[np.array(rows)]


# -- the order of datasets --------------------------------------------------------------------------------------------

OWN_ORDER = ("Shuffle the dataset after it is sharded, or pass a seed that is the same on all ranks. For list_files: "
             "tf.data.Dataset.list_files(pattern, shuffle=False).")


def is_sharded_in_own_order(data: object) -> bool:
    """Return whether `data` is a dataset that is shuffled without a seed and then divided by Dataset.shard(). Local."""
    return _is_dataset(data) and any("ShardDataset" in type(each).__name__ and is_in_own_order(each)
                                     for each in _datasets_in(data))


def is_in_own_order(dataset: object) -> bool:
    """Return whether a dataset has a random order without a seed. TensorFlow then stores zero for both seeds. Local."""
    return any(all(int(getattr(each, name, 1)) == 0 for name in ("_seed", "_seed2")) for each in _datasets_in(dataset))


def _datasets_in(dataset: object) -> Iterator[object]:
    """Yield a dataset and all its inputs; only the dataset if TensorFlow lacks its private method `_inputs`."""
    yield dataset
    for other in getattr(dataset, "_inputs", list)():
        yield from _datasets_in(other)


# -- datasets of TensorFlow -------------------------------------------------------------------------------------------


def _is_dataset(data: object) -> TypeGuard[_Dataset]:
    return all(hasattr(data, name) for name in ("element_spec", "cardinality", "shard", "window"))


def _elements(dataset: _Dataset, rank: int, size: int, uneven: str) -> _Dataset:
    count = int(dataset.cardinality())
    if size == 1 or count == _INFINITE:
        return dataset.shard(size, rank)
    if count == _UNKNOWN:
        return _grouped_elements(dataset, rank, size, uneven)
    if uneven == "pad":
        return dataset.concatenate(dataset.take(-count % size)).shard(size, rank)
    return dataset.take(count // size * size).shard(size, rank)


def _grouped_elements(dataset: _Dataset, rank: int, size: int, uneven: str) -> _Dataset:
    """Return this rank's elements of a dataset of unknown size, without a first pass that counts the elements.

    Each group of `size` elements is a window, from which each rank takes one element. A window may have elements of any
    kind: nested, ragged, sparse, and of different shapes. With "drop" an incomplete last window is left out. With "pad"
    an incomplete last window is filled with the first elements of the dataset.
    """
    if "NoneTensorSpec" in repr(dataset.element_spec):  # tf.data cannot make windows of elements with None.
        raise InvalidRequestError(
            "shard() must know the number of elements of a dataset whose elements contain None. Remove the None, or "
            f"use dataset.apply(tf.data.experimental.assert_cardinality(n)). Received: {dataset}")

    def of_window(*window: object) -> _Dataset:
        # flat_map passes the components of a tuple as arguments. A window of nested elements is a nest of datasets.
        elements = dataset.zip(window if type(dataset.element_spec) is tuple else window[0])
        if uneven == "pad":
            elements = elements.concatenate(dataset.repeat())
        return elements.skip(rank).take(1)

    return dataset.window(size, drop_remainder=uneven == "drop").flat_map(of_window)
