"""NCCL's numbers for dtypes, operations and results (from nccl.h), wire formats of other dtypes, and NcclCommunicator.

All numbers are those of NCCL 2.32. Shared by the modules of NCCL.
"""

from functools import cache
from typing import NamedTuple, Protocol

import numpy as np

from ..core.arithmetic import IDENTITY, Reduction, Scale
from ..core.request import ReduceOp

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
DTYPES = {"int8": INT8, "uint8": UINT8, "int32": INT32, "uint32": UINT32, "int64": INT64, "uint64": UINT64,
          "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64, "bfloat16": BFLOAT16}
OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
AVERAGE = 4
# The first version code with AVERAGE. NCCL divides the floating-point numbers of each rank before it sums them, so that
# a sum in half precision does not overflow.
AVERAGES_FROM = 21000
# Results of NCCL's calls that cupy 13 and 14 have no name for; its NcclError(7) is a KeyError.
RESULTS = {7: "ncclInProgress: the call has not ended (is NCCL_COMM_BLOCKING=0 set?)", 8: "ncclTimeout"}

# Truncated sums and products of the wider integers equal those of the narrow ones.
_WIDER = {"int16": "int32", "uint16": "uint32"}
_WIDE = ("float32", "float64")
_FLOATS = ("float16", "bfloat16", *_WIDE)
_PARTS = {"complex64": "float32", "complex128": "float64"}


class NcclCommunicator(Protocol):
    """The methods of cupy's NcclCommunicator. Arguments are addresses, counts, and the numbers of this module."""

    def allReduce(self, source: int, target: int, count: int, dtype: int, op: int, stream: int) -> None: ...  # noqa: N802

    def reduceScatter(self, source: int, target: int, count: int, dtype: int, op: int,  # noqa: N802
                      stream: int) -> None: ...

    def allGather(self, source: int, target: int, count: int, dtype: int, stream: int) -> None: ...  # noqa: N802

    def reduce(self, source: int, target: int, count: int, dtype: int, op: int, root: int, stream: int) -> None: ...

    def broadcast(self, source: int, target: int, count: int, dtype: int, root: int, stream: int) -> None: ...

    def send(self, source: int, count: int, dtype: int, peer: int, stream: int) -> None: ...

    def recv(self, target: int, count: int, dtype: int, peer: int, stream: int) -> None: ...

    def check_async_error(self) -> None: ...

    def revoke(self) -> bool: ...  # of nccl_library.Communicator; all other methods are cupy's

    def abort(self) -> None: ...

    def destroy(self) -> None: ...


class WireFormat(NamedTuple):
    """How elements are sent: each is `parts` numbers of dtype `memory`, which are converted to `dtype`."""

    memory: str
    dtype: str
    parts: int = 1

    @property
    def is_converted(self) -> bool:
        """Whether the numbers are converted before they are sent."""
        return self.memory != self.dtype

    @property
    def itemsize(self) -> int:
        """The bytes of a number on the wire."""
        return _itemsize(self.dtype)

    @property
    def memory_bytes(self) -> int:
        """The bytes of a number in memory."""
        return _itemsize(self.memory)


@cache
def _itemsize(dtype: str) -> int:
    # numpy knows bfloat16 only with ml_dtypes.
    return np.dtype("uint16" if dtype == "bfloat16" else dtype).itemsize


def wire_format(dtype: str, op: ReduceOp, wire_dtype: str = "") -> WireFormat | None:
    """The format in which NCCL can reduce `dtype`; None if it cannot. Wider floats are sent as `wire_dtype`."""
    if wire_dtype and dtype in _WIDE:
        return WireFormat(dtype, wire_dtype)
    if dtype in DTYPES:
        return WireFormat(dtype, dtype)
    if dtype in _WIDER:
        return WireFormat(dtype, _WIDER[dtype])
    if dtype == "bool":
        # Minimum, maximum and product of zeros and ones are zeros and ones.
        return WireFormat("uint8", "uint8")
    if dtype in _PARTS and op is ReduceOp.SUM:
        return WireFormat(_PARTS[dtype], _PARTS[dtype], 2)
    return None


class NcclReduction(NamedTuple):
    """A reduction by NCCL: multiply by `prescale`, reduce with the number `operation`, and apply `scale`."""

    operation: int
    prescale: float
    scale: Scale


def nccl_reduction(reduction: Reduction, wire: WireFormat, size: int, version: int) -> NcclReduction:
    """Return how NCCL does `reduction` among `size` ranks. An average without another scale is NCCL's ncclAvg.

    While ranks wait in join(), an average divides by fewer ranks than the communicator has, and is a scaled sum.
    """
    scale = reduction.scale
    if (reduction.op is ReduceOp.SUM and 1 < size == scale.divisor and (reduction.prescale, scale.factor) == (1.0, 1.0)
            and wire.dtype in _FLOATS and version >= AVERAGES_FROM):
        return NcclReduction(AVERAGE, 1.0, IDENTITY)
    return NcclReduction(OPERATIONS[reduction.op], reduction.prescale, scale)
