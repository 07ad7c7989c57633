"""Fusion: which tensors share one reduction (plan_buckets), and memory to join them in (FusionBuffer)."""

from collections.abc import Hashable, Sequence

import numpy as np

from .memory import aligned_empty


def plan_buckets(members: Sequence[tuple[Hashable, int]], limit: int) -> list[list[int]]:
    """Group members into buckets that are reduced as one. Pure: all ranks get the same plan from the same members.

    Starts with the first member and adds later ones of the same key. On one of another key it looks ahead, as Horovod
    does, as long as what is taken and what is skipped together stay within `limit`; so interleaved dtypes still fuse.

    Args:
        members: (key, bytes) of each tensor; only equal keys (dtype, operation, scale) may share a bucket.
        limit: Bytes in a bucket. A larger member gets a bucket of its own; 0: every member does.

    Returns:
        Buckets as lists of indices into `members`, in order of their first index.
    """
    buckets = []
    waiting = list(range(len(members)))
    while waiting:
        key, used = members[waiting[0]]
        bucket, skipped, seen_bytes = [waiting[0]], [], 0
        for position in range(1, len(waiting)):
            index = waiting[position]
            other_key, nbytes = members[index]
            if other_key == key and used + nbytes <= limit:
                bucket.append(index)
                used += nbytes
                continue
            seen_bytes += nbytes
            skipped.append(index)
            if used + seen_bytes > limit:
                skipped += waiting[position + 1:]
                break
        buckets.append(bucket)
        waiting = skipped
    return buckets


class FusionBuffer:
    """Memory that grows to the largest bucket seen and is used again for every bucket. One thread only."""

    def __init__(self) -> None:
        self._memory = aligned_empty(0)

    def view(self, elements: int, dtype: np.dtype) -> np.ndarray:
        """A 1-D array of `elements` over the buffer; what it held before is lost."""
        nbytes = elements * dtype.itemsize
        if nbytes > self._memory.nbytes:
            self._memory = aligned_empty(nbytes)
        return self._memory[:nbytes].view(dtype)
