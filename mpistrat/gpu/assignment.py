"""Which GPU a rank uses, decided from the ranks of its host and the environment. Nothing here looks at a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """What a rank does with the GPUs it sees.

    Attributes:
        index: The one to use, among those that this process sees; None: there is none, or it is the only one.
        sentence: What to tell the user, once for a host.
        is_shared: Other ranks of the host use the same GPU.
    """

    index: int | None
    sentence: str
    is_shared: bool = False


def choose(local_rank: int, local_size: int, gpus: int, visible_devices: str | None) -> Pin:
    """One GPU for each rank of a host, in order, and from the first again when there are more ranks than GPUs.

    Args:
        local_rank: This rank among the ranks of its host.
        local_size: How many ranks the host has.
        gpus: How many GPUs this process sees: all of the host's, or those that CUDA_VISIBLE_DEVICES names.
        visible_devices: CUDA_VISIBLE_DEVICES, or None where it is not set.
    """
    named = f" (CUDA_VISIBLE_DEVICES={visible_devices})" if visible_devices is not None else ""
    if gpus == 0:
        return Pin(None, f"no GPU is visible{named}; training on the CPU")
    if gpus == 1:
        if local_size == 1:
            return Pin(0, f"one rank, one GPU{named}")
        if visible_devices is None:
            return Pin(0, f"{local_size} ranks share the host's only GPU", is_shared=True)
        # A launcher may have given each rank a GPU of its own; whether it did is told by the devices' UUIDs later.
        return Pin(0, f"each rank uses the GPU that its CUDA_VISIBLE_DEVICES names ({_mig(visible_devices)})")
    index = local_rank % gpus
    if local_size == 1:
        return Pin(index, f"the host's only rank uses one of {gpus} GPUs{named}")
    if local_size > gpus:
        return Pin(index, f"{local_size} ranks share {gpus} GPUs{named}; NCCL wants one rank for each GPU",
                   is_shared=True)
    return Pin(index, f"{local_size} ranks use a GPU each, of {gpus}{named}")


def _mig(visible_devices: str) -> str:
    # CUDA shows a process at most one instance of a divided GPU, whichever others are named.
    is_instance = visible_devices.strip().upper().startswith("MIG-")
    return f"{visible_devices}, an instance of a divided GPU" if is_instance else visible_devices
