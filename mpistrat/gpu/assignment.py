"""Assigns a GPU to each rank of a host, and NCCL on a GPU to one process set. Any thread may call the functions.

An NCCL kernel waits on the GPU for the same kernel of the other ranks. Kernels of two communicators may deadlock if
ranks start them in different orders and a GPU cannot run both at once:
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html. Ranks may start the collectives of
two process sets in different orders, because each set has its own engine. Therefore only one process set uses NCCL on a
GPU. A set of one rank is an exception, because it waits for no other rank. For the communicators within one process
set, environment variables prevent the deadlock.
"""

import threading
from collections.abc import MutableMapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary, ref

from .arrays import GpuDevice

_owners: "WeakKeyDictionary[GpuDevice, ref[object]]" = WeakKeyDictionary()
_lock = threading.Lock()


@dataclass(frozen=True)
class Pin:
    """The GPU of a rank."""

    index: int | None  # The index of the GPU among those visible to this process; None: no GPU is visible.
    sentence: str  # The text for the user, to be logged once per host.
    is_shared: bool = False  # Whether other ranks of the host use the same GPU.


def choose(local_rank: int, local_size: int, gpus: int, visible_devices: str | None) -> Pin:
    """Return the GPU of this rank: the one with index `local_rank` modulo `gpus`. Does not call CUDA.

    Args:
        local_rank: This rank's position among the ranks of its host.
        local_size: The number of ranks on the host.
        gpus: The number of GPUs that are visible to this process.
        visible_devices: The value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    named = f" (CUDA_VISIBLE_DEVICES={visible_devices})" if visible_devices is not None else ""
    if gpus == 0:
        return Pin(None, f"no GPU is visible{named}; training on the CPU")
    if gpus == 1:
        if local_size == 1:
            return Pin(0, f"one rank, one GPU{named}")
        if visible_devices is None:
            return Pin(0, f"{local_size} ranks share the host's only GPU", is_shared=True)
        # A launcher may have assigned each rank its own GPU. Later the devices' UUIDs show whether it has. CUDA makes
        # at most one instance of a divided GPU visible to a process.
        divided = ", an instance of a divided GPU" if visible_devices.strip().upper().startswith("MIG-") else ""
        return Pin(0, f"each rank uses the GPU that its CUDA_VISIBLE_DEVICES names ({visible_devices}{divided})")
    index = local_rank % gpus
    if local_size == 1:
        return Pin(index, f"the host's only rank uses one of {gpus} GPUs{named}")
    if local_size > gpus:
        return Pin(index, f"{local_size} ranks share {gpus} GPUs{named}; NCCL needs one rank per GPU",
                   is_shared=True)
    return Pin(index, f"{local_size} ranks use one GPU each; {gpus} GPUs are visible{named}")


def claim(device: GpuDevice, owner: object) -> bool:
    """Claim NCCL on this rank's GPU for `owner`. Return False if a different owner holds the claim.

    The claim ends when `release` is called or the owner is deleted.
    """
    with _lock:
        holder = _owners.get(device)
        other = None if holder is None else holder()
        if other is None:
            _owners[device] = ref(owner)
        return other is None or other is owner


def release(device: GpuDevice, owner: object) -> None:
    """End the claim of `owner`. Does nothing if `owner` holds no claim."""
    with _lock:
        holder = _owners.get(device)
        if holder is not None and holder() is owner:
            del _owners[device]


def set_cuda_variables(environ: MutableMapping[str, str], nccl_streams: int) -> None:
    """Set environment variables of CUDA, NCCL and TensorFlow in `environ`, unless the user has set them.

    These libraries read the variables only once, so this must run before the first call of a library. `nccl_streams`:
    The number of NCCL communicators of a process set.
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
