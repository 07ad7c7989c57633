"""Assigns GPUs to the ranks of a host. Pure: decides from numbers and the environment, without access to a GPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """The GPU of a rank."""

    index: int | None  # The index of the GPU among those visible to this process; None: no GPU is visible.
    sentence: str  # The text for the user, to be logged once per host.
    is_shared: bool = False  # Whether other ranks of the host use the same GPU.


def choose(local_rank: int, local_size: int, gpus: int, visible_devices: str | None) -> Pin:
    """Assign one GPU to each rank of a host, in order; from the first again if there are more ranks than GPUs.

    Args:
        local_rank: This rank's position among the ranks of its host.
        local_size: The number of ranks on the host.
        gpus: The number of GPUs visible to this process: all of the host, or those in CUDA_VISIBLE_DEVICES.
        visible_devices: CUDA_VISIBLE_DEVICES; None if it is not set.
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
    return Pin(index, f"{local_size} ranks use a GPU each, of {gpus}{named}")
