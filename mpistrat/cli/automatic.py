"""The number of ranks of `-np auto`: the slots of the given hosts, or the GPUs or cores here (docs/running.md)."""

from collections.abc import Mapping

from ..core.errors import LaunchError
from .arguments import HostList, counted
from .inventory import nvidia_gpus
from .mpirun import Machine


def automatic(hosts: HostList | None, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks, and its explanation. Raises LaunchError: The slots of the hosts are not known."""
    if hosts is not None and hosts.slots is not None:
        return hosts.slots, f"{counted(hosts.slots, 'rank')}, one for each slot of the hosts"
    if hosts is not None or machine.has_allocation:
        where = f"hosts without a number ({hosts})" if hosts is not None else "the hosts of the batch system"
        raise LaunchError(f"-np auto does not know how many ranks {where} can take. Write a number after each host, or "
                          "write the number of ranks, for example: -np 8")
    visible = environ.get("CUDA_VISIBLE_DEVICES")  # "-1" and "" hide all GPUs.
    named = [device for device in map(str.strip, (visible or "").split(",")) if device and not device.startswith("-")]
    gpus = len(named) if visible is not None else len(nvidia_gpus(environ))
    if gpus:
        return gpus, f"{counted(gpus, 'rank')}, one for each GPU"
    ranks = max(1, machine.cores // 2)
    return ranks, f"{counted(ranks, 'rank')}, one for each pair of cores"
