"""The CPUs of a host, and the division of its cores among the ranks: shares are equal and disjoint.

The module imports only the standard library, because the start-up code of a rank executes this file without the
package, before the script imports numpy: numpy sizes its thread pool by the CPUs that the process may use at that
time. A CPU is a hardware thread, as in Linux' affinity masks.
"""

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

SYSTEM = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")
NVIDIA = Path("/proc/driver/nvidia/gpus")


def own_cpus() -> frozenset[int]:
    """Return the CPUs that this thread may use; an empty set if the system has no sched_getaffinity."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def physical_cores(cpus: Collection[int], system: Path = SYSTEM) -> list[frozenset[int]]:
    """Group `cpus` by core. Return the CPUs of each core. Cores of one socket are next to each other in the list."""
    cores: dict[tuple[int, frozenset[int]], set[int]] = {}
    for cpu in sorted(cpus):
        topology = system / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            siblings = parse_list((topology / "thread_siblings_list").read_text())
        except (OSError, ValueError):
            socket, siblings = 0, frozenset({cpu})
        cores.setdefault((socket, siblings), set()).add(cpu)
    return [frozenset(threads) for (socket, _), threads in
            sorted(cores.items(), key=lambda item: (item[0][0], min(item[1])))]


def parse_list(text: str) -> frozenset[int]:
    """Return the numbers in a list in Linux' format, such as "0-3,8". Raises ValueError: `text` has another format."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def gpu_cpus(nvidia: Path = NVIDIA, pci: Path = PCI) -> list[frozenset[int]]:
    """Return the CPUs near each NVIDIA GPU, in PCI bus order of the GPUs; [] if Linux does not list them."""
    try:
        return [parse_list((pci / gpu.name / "local_cpulist").read_text()) for gpu in sorted(nvidia.iterdir())]
    except (OSError, ValueError):
        return []


def share(cpus: frozenset[int], rank: int, size: int, near: Sequence[frozenset[int]] = (),
          system: Path = SYSTEM) -> frozenset[int] | None:
    """Return the CPUs of one rank: each rank of a host gets the same number of cores, and no core has two ranks.

    Cores that remain after an even division stay unused. If each rank has a GPU, the ranks whose GPUs are near the same
    CPUs divide these CPUs among themselves. Returns None if there are fewer cores than ranks.

    Args:
        cpus: The CPUs that the job may use on this host.
        rank, size: The local rank, and the number of ranks of the host.
        near: The CPUs near each GPU of the host. Rank r uses GPU r.
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
    """Restrict all threads of this process, and threads that they start later, to `cpus`. Raises OSError."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # The thread has ended meanwhile.
            os.sched_setaffinity(int(thread), cpus)


def take_share_at_start(place: tuple[int, int] | None, environ: Mapping[str, str]) -> frozenset[int]:
    """Restrict this process to its share of the CPUs. Called when Python starts on a rank of `mpistrat run`.

    `place`: The local rank, and the number of ranks of the host; None if unknown. Returns the CPUs of the share, which
    init() logs later; an empty set if the process is not restricted.
    """
    cpus = own_cpus()
    if place is not None and place[1] > 1 and cpus:
        chosen = share(cpus, *place, gpu_cpus() if "CUDA_VISIBLE_DEVICES" not in environ else ())
        if chosen is not None:
            take(chosen)
            return chosen
    return frozenset()
