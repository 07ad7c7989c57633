"""Which rows of a tensor go to which rank, in reduce-scatters and all-to-alls; and rows for a digest. Pure."""

import math
from collections.abc import Sequence

import numpy as np

from .errors import InvalidRequestError
from .topology import Topology


def row_size(shape: Sequence[int]) -> int:
    """How many elements a row of a tensor of this shape has."""
    return math.prod(shape[1:])


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """How many rows of a reduced tensor each rank gets. As in Horovod, the first `rows % size` ranks get one more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


def even_splits(name: str, rows: int, size: int) -> list[int]:
    """The splits of an all-to-all in which all ranks get as many rows.

    Raises InvalidRequestError: The rows cannot be divided so.
    """
    if rows % size:
        raise InvalidRequestError(f"{name}: alltoall without splits needs a number of rows that the number of ranks, "
                                  f"{size}, divides. Received: {rows} rows. Pass splits=.")
    return [rows // size] * size


def int32_splits(name: str, splits: object) -> np.ndarray:
    """The splits of an all-to-all in the dtype in which the ranks exchange them.

    Raises InvalidRequestError: They are not integers of 32 bits.
    """
    values, limits = np.asarray(splits), np.iinfo(np.int32)
    if values.size and (values.dtype.kind not in "iu" or values.min() < limits.min or values.max() > limits.max):
        raise no_int32_splits(name, splits)
    return values.astype(np.int32)


def no_int32_splits(name: str, splits: object) -> InvalidRequestError:
    """The error of an all-to-all whose splits are not integers of 32 bits."""
    return InvalidRequestError(f"{name}: the splits of an alltoall are integers of 32 bits. Received: {splits!r}")


def received_rows(name: str, table: np.ndarray, topology: Topology) -> np.ndarray:
    """How many rows this rank receives from each rank in an all-to-all.

    Row r of the table has the number of rows of rank r's tensor, and how many of them it sends to each rank.

    Raises:
        InvalidRequestError: The splits of some rank are negative, or more than its rows. The same on all ranks.
    """
    for sender, (rows, *splits) in zip(topology.job_ranks, table.tolist(), strict=True):
        if min(splits) < 0:
            raise InvalidRequestError(f"{name}: alltoall: the splits of rank {sender} are negative: {splits}")
        if sum(splits) > rows:
            raise InvalidRequestError(f"{name}: alltoall: the splits of rank {sender}, {splits}, add up to more than "
                                      f"the {rows} rows of its tensor.")
    return table[:, 1 + topology.rank]


def exchanged_elements(table: np.ndarray, rank: int, elements: int) -> tuple[list[int], list[int], int]:
    """How many elements `rank` sends to each rank and receives from each, and the most that any rank sends to any.

    A row of the tensor has `elements` of them. The table is that of received_rows, which has checked it.
    """
    parts = table[:, 1:] * elements
    return parts[rank].tolist(), parts[:, rank].tolist(), int(parts.max())


# At most so many rows of an array, and of large rows no more than have this size, but at least a few.
_SAMPLE_ROWS, _SAMPLE_BYTES, _FEWEST_ROWS = 256, 1 << 20, 8


def places_of_sample(rows: int, row_bytes: int) -> np.ndarray:
    """The places of rows at equal distances, for a digest of an array with so many rows, at least one, of this size."""
    count = min(rows, _SAMPLE_ROWS, max(_FEWEST_ROWS, _SAMPLE_BYTES // max(row_bytes, 1)))
    return np.linspace(0, rows - 1, count).astype(np.int64)
