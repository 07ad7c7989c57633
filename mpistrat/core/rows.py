"""The rows that each rank gets in reduce-scatters and all-to-alls, and the rows by which ranks compare arrays. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from .errors import InvalidRequestError
from .topology import Topology


def row_size(shape: Sequence[int]) -> int:
    """Return the number of elements in a row of a tensor of this shape."""
    return math.prod(shape[1:])


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each rank gets. As in Horovod, the first `rows % size` ranks get one row more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def even_splits(name: str, rows: int, size: int) -> list[int]:
    """Return the splits of an all-to-all in which all ranks get the same number of rows.

    Raises InvalidRequestError: The number of rows is not divisible by the number of ranks.
    """
    if rows % size:
        raise InvalidRequestError(f"{name}: without splits=, the number of rows of an alltoall must be divisible by "
                                  f"the number of ranks, {size}. Pass splits=. Received: {rows} rows")
    return [rows // size] * size


def int32_splits(name: str, splits: object) -> np.ndarray:
    """Return the splits of an all-to-all as int32, the dtype in which the ranks exchange them.

    Raises InvalidRequestError: The splits are not integers, or do not fit into int32.
    """
    values, limits = np.asarray(splits), np.iinfo(np.int32)
    if values.size and (values.dtype.kind not in "iu" or values.min() < limits.min or values.max() > limits.max):
        raise no_int32_splits(name, splits)
    return values.astype(np.int32)


def no_int32_splits(name: str, splits: object) -> InvalidRequestError:
    """Return the error for splits of an all-to-all that are not 32-bit integers."""
    return InvalidRequestError(f"{name}: the splits of an alltoall must be 32-bit integers. Received: {splits!r}")


def received_rows(name: str, table: np.ndarray, topology: Topology) -> np.ndarray:
    """Return the number of rows that this rank receives from each rank in an all-to-all.

    `table[r]` has the number of rows of rank r's tensor, and then the number of rows that rank r sends to each rank.

    Raises InvalidRequestError: Splits of a rank are negative, or exceed the rows of its tensor. All ranks raise it.
    """
    for sender, (rows, *splits) in zip(topology.job_ranks, table.tolist(), strict=True):
        if min(splits) < 0:
            raise InvalidRequestError(f"{name}: alltoall: the splits of rank {sender} are negative: {splits}")
        if sum(splits) > rows:
            raise InvalidRequestError(f"{name}: alltoall: the splits of rank {sender}, {splits}, add up to more than "
                                      f"the {rows} rows of its tensor.")
    return table[:, 1 + topology.rank]


def exchanged_elements(table: np.ndarray, rank: int, elements: int) -> tuple[list[int], list[int], int]:
    """Return the counts of elements in an all-to-all: (`rank` to each rank, each rank to `rank`, the largest count).

    The largest count is over all senders and receivers. `table`: See received_rows. A row has `elements` elements.
    """
    parts = table[:, 1:] * elements
    return parts[rank].tolist(), parts[:, rank].tolist(), int(parts.max())


# The largest number of rows in a sample, the limit on its bytes, and the smallest number of rows whatever their size.
_SAMPLE_ROWS, _SAMPLE_BYTES, _FEWEST_ROWS = 256, 1 << 20, 8


def places_of_sample(rows: int, row_bytes: int) -> np.ndarray:
    """Return evenly spaced indices of the rows to compare. `rows`: At least 1. `row_bytes`: The bytes of a row."""
    count = min(rows, _SAMPLE_ROWS, max(_FEWEST_ROWS, _SAMPLE_BYTES // max(row_bytes, 1)))
    return np.linspace(0, rows - 1, count).astype(np.int64)
