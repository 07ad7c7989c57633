"""NCCL's numbers for dtypes and operations, and what a dtype that NCCL lacks travels as. From nccl.h."""

from typing import NamedTuple

import numpy as np

from ...core.request import ReduceOp

INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 = range(10)
DTYPES = {"int8": INT8, "uint8": UINT8, "int32": INT32, "uint32": UINT32, "int64": INT64, "uint64": UINT64,
          "float16": FLOAT16, "float32": FLOAT32, "float64": FLOAT64, "bfloat16": BFLOAT16}
OPERATIONS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}

# Sums and products of the wider type, cut off, are those of the narrow one.
_WIDER = {"int16": "int32", "uint16": "uint32"}
_WIDE = ("float32", "float64")
_PARTS = {"complex64": "float32", "complex128": "float64"}


class WireFormat(NamedTuple):
    """How elements travel: each as `parts` numbers that memory holds as `memory`, converted to `dtype`."""

    memory: str
    dtype: str
    parts: int = 1

    @property
    def is_converted(self) -> bool:
        """Whether the numbers are other bytes on the way than in memory."""
        return self.memory != self.dtype


def wire_format(dtype: str, op: ReduceOp, wire: str = "") -> WireFormat | None:
    """How NCCL can reduce `dtype`, or None where it cannot. Floating-point numbers wider than `wire` travel as that."""
    if wire and dtype in _WIDE:
        return WireFormat(dtype, wire)
    if dtype in DTYPES:
        return WireFormat(dtype, dtype)
    if dtype in _WIDER:
        return WireFormat(dtype, _WIDER[dtype])
    if dtype == "bool":
        # 0 and 1, of which the least, the greatest and the product are 0 and 1 again.
        return WireFormat("uint8", "uint8")
    if dtype in _PARTS and op is ReduceOp.SUM:
        return WireFormat(_PARTS[dtype], _PARTS[dtype], 2)
    return None


def storage(dtype: str) -> str:
    """A dtype that numpy knows by itself, of the same size."""
    return "uint16" if dtype == "bfloat16" else dtype


def narrowest(wire: WireFormat) -> int:
    """The bytes of a number where it is narrower, which decides how many of them make an aligned lump."""
    return min(np.dtype(storage(name)).itemsize for name in (wire.memory, wire.dtype))
