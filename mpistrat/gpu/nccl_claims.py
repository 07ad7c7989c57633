"""Keeps the kernels of several NCCL communicators on a GPU from a deadlock.

An NCCL kernel waits on the GPU for the same kernel on the other ranks. If a kernel of another communicator cannot start
meanwhile, ranks that started the two kernels in different orders wait for each other for ever:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html. So environment variables let the
kernels of one group of ranks run at the same time, and only one group uses NCCL on a GPU: ranks in two process sets may
start the collectives of the two sets in different orders, because each set has its own engine. A set does not use NCCL
if its ranks are in another set that uses NCCL. A set of one rank waits for no other rank, and makes no claim. Any
thread may call the functions.
"""

import threading
from collections.abc import MutableMapping
from weakref import WeakKeyDictionary, ref

from .arrays import GpuDevice

_owners: "WeakKeyDictionary[GpuDevice, ref[object]]" = WeakKeyDictionary()
_lock = threading.Lock()


def claim(device: GpuDevice, owner: object) -> bool:
    """Claim NCCL on this rank's GPU for `owner`, unless another owner has. Returns whether `owner` may use NCCL.

    The claim ends by `release`, or when the owner is deleted.
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


def set_cuda_variables(environ: MutableMapping[str, str], nccl_streams: int) -> None:
    """Set the environment variables that the user has not set.

    CUDA, NCCL and TensorFlow read them once, when the first of their functions is called.

    Args:
        environ: The environment of this process.
        nccl_streams: The number of communicators of a group of ranks.
    """
    # Streams beyond this number share a queue, in which a kernel waits for the one before. CUDA's default is 8, and
    # TensorFlow alone has four.
    environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Loading a kernel at its first launch may wait for all kernels that run.
    environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    # TensorFlow adds rows of a GPU that repeat (the gradient of an Embedding) by atomic additions, in another order on
    # each rank. With this it sorts them first: UseDeterministicSegmentReductions in
    # https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/core/kernels/segment_reduction_ops_gpu.cu.h
    environ.setdefault("TF_USE_DETERMINISTIC_SEGMENT_REDUCTIONS", "1")
    if nccl_streams > 1:
        # The engine launches in the same order on all ranks, and NCCL then keeps the GPU to this order.
        environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
