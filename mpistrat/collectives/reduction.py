"""The arithmetic of a reduction: combine the ranks' values in the order of the ranks, on numpy arrays."""

from collections.abc import Sequence

import numpy as np

from ..dtypes import is_half
from ..messages import ReduceOp
from ..scale import Scale

_UFUNCS = {ReduceOp.SUM: np.add, ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}


def combine(parts: Sequence[np.ndarray] | np.ndarray, op: ReduceOp, target: np.ndarray, scale: Scale) -> None:
    """Write `parts[0] op parts[1] op ...`, scaled, to `target`, elementwise, from left to right.

    float16 and bfloat16 are combined and scaled in float32 and rounded once. Integers wrap; NaN and infinities
    propagate as IEEE 754 has it (a NaN wins in MIN and MAX too). `target` may be one of `parts`.
    """
    ufunc = _UFUNCS[op]
    if is_half(target.dtype):
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            ufunc(total, part.astype(np.float32), out=total)
        scale.apply(total, target)
        return
    if len(parts) == 1:
        scale.apply(parts[0], target)
        return
    if len(parts) > 2 and any(np.may_share_memory(target, part) for part in parts[2:]):
        parts = np.stack(list(parts))
    ufunc(parts[0], parts[1], out=target)
    for part in parts[2:]:
        ufunc(target, part, out=target)
    if not scale.is_identity:
        scale.apply(target, target)
