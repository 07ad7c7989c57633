"""The number of ranks of `-np auto`: that of the hosts that are named, or what fits this host (docs/running.md)."""

from collections.abc import Mapping

from ..core.errors import LaunchError
from .arguments import counted
from .hostfile import HostList
from .inventory import nvidia_gpus
from .mpirun import Machine


def automatic(hosts: HostList | None, machine: Machine, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the number of ranks, and what to say about it. Raises LaunchError: It cannot be known here."""
    if hosts is not None and hosts.slots is not None:
        return hosts.slots, f"{counted(hosts.slots, 'rank')}, as many as the hosts have slots"
    if hosts is not None or machine.has_allocation:
        where = f"hosts without a number ({hosts})" if hosts is not None else "the hosts of the batch system"
        raise LaunchError(f"-np auto does not know how many ranks {where} can take. Write a number after each host, or "
                          "for example: -np 8")
    visible = environ.get("CUDA_VISIBLE_DEVICES")  # "-1" and "" hide all GPUs.
    named = [device for device in map(str.strip, (visible or "").split(",")) if device and not device.startswith("-")]
    gpus = len(named) if visible is not None else len(nvidia_gpus(environ))
    if gpus:
        return gpus, f"{counted(gpus, 'rank')}, one for each GPU"
    ranks = max(1, machine.cores // 2)
    return ranks, f"{counted(ranks, 'rank')}, one for each pair of cores"
