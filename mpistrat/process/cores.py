"""The CPUs of a host, and the equal, disjoint shares of its cores that the ranks take.

It imports nothing but the standard library, because the start-up code of `mpistrat run` executes this file alone,
before the script can import numpy: libraries count their threads by the CPUs that the process may use when they load.
A CPU is a hardware thread, as in Linux' affinity masks.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")
NVIDIA = Path("/proc/driver/nvidia/gpus")


def own_cpus() -> frozenset[int]:
    """The CPUs that this thread may use; empty where the system does not say."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def physical_cores(cpus: Collection[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Those of `cpus` that each core has, in an order in which neighbours are in one socket."""
    cores: dict[tuple[int, frozenset[int]], set[int]] = {}
    for cpu in sorted(cpus):
        try:
            topology = system / f"cpu{cpu}" / "topology"
            socket = int((topology / "physical_package_id").read_text())
            siblings = parse_list((topology / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            socket, siblings = 0, frozenset({cpu})
        cores.setdefault((socket, siblings), set()).add(cpu)
    return [frozenset(threads) for (socket, _), threads in
            sorted(cores.items(), key=lambda item: (item[0][0], min(item[1])))]


def parse_list(text: str) -> frozenset[int]:
    """The numbers of a list as Linux writes it: "0-3,8". Raises ValueError if it is none."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def gpu_cpus(nvidia: Path = NVIDIA, pci: Path = PCI) -> list[frozenset[int]]:
    """The CPUs near each NVIDIA GPU, in the order of the PCI bus; [] if there is none, or Linux does not say."""
    try:
        return [parse_list((pci / gpu.name / "local_cpulist").read_text()) for gpu in sorted(nvidia.iterdir())]
    except (OSError, ValueError):
        return []


def share(cpus: frozenset[int], rank: int, size: int, near: Sequence[frozenset[int]] = (),
          system: Path = SYSTEM) -> frozenset[int] | None:
    """The CPUs that a rank takes: an equal number of cores for each rank of a host, and each core for one rank.

    Cores that are left when all ranks have as many stay free. If the ranks have a GPU each, the ranks whose GPUs are
    near the same CPUs share those.

    Args:
        cpus: Those that the job may use on this host.
        rank, size: The rank among the ranks of the host, and their number.
        near: The CPUs near each GPU of the host. Rank r uses GPU r.

    Returns:
        None if there are fewer cores than ranks.
    """
    if size <= len(near):
        beside = [near[other] & cpus for other in range(size)]
        same = [other for other in range(size) if beside[other] == beside[rank]]
        are_apart = all(a == b or not a & b for a in beside for b in beside)
        if are_apart and all(len(physical_cores(a, system)) >= beside.count(a) for a in beside):
            cpus, rank, size = beside[rank], same.index(rank), len(same)
    cores = physical_cores(cpus, system)
    each = len(cores) // size
    return frozenset().union(*cores[rank * each:(rank + 1) * each]) if each else None


def take(cpus: Collection[int]) -> None:
    """Let all threads of this process, and those that they start, run on these CPUs only. Raises OSError."""
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue  # It has ended meanwhile.


def take_share_at_start(place: tuple[int, int] | None, environ: Mapping[str, str]) -> frozenset[int]:
    """Take the share of this rank, when Python starts on a rank of `mpistrat run`. init() logs what came of it.

    `place`: The rank among those of its host, and their number; None: not known.

    Returns the CPUs that it has taken, or none.
    """
    cpus = own_cpus()
    if place is not None and place[1] > 1 and cpus:
        chosen = share(cpus, *place, gpu_cpus() if "CUDA_VISIBLE_DEVICES" not in environ else ())
        if chosen is not None:
            take(chosen)
            return chosen
    return frozenset()
