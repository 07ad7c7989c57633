"""Which group of ranks uses NCCL on a GPU: one at a time.

Ranks that are in two process sets may start the collectives of these in different orders, because each set has its own
engine. NCCL may then wait for ever (see gpu.cuda_variables). So a set whose ranks are in another one that uses NCCL
does without. A set of one rank waits for nobody, and makes no claim. Any thread may call the functions.
"""

import threading
from weakref import WeakKeyDictionary, ref

from ..arrays import GpuDevice

_owners: "WeakKeyDictionary[GpuDevice, ref[object]]" = WeakKeyDictionary()
_lock = threading.Lock()


def claim(device: GpuDevice, owner: object) -> bool:
    """Note that `owner` uses NCCL on this rank's GPU, unless another one does. Returns whether it may.

    The claim ends by `release`, or with the owner.
    """
    with _lock:
        holder = _owners.get(device)
        other = None if holder is None else holder()
        if other is None:
            _owners[device] = ref(owner)
        return other is None or other is owner


def release(device: GpuDevice, owner: object) -> None:
    """End the owner's claim, if it has one."""
    with _lock:
        holder = _owners.get(device)
        if holder is not None and holder() is owner:
            del _owners[device]
