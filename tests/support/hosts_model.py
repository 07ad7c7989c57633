"""A model of all-reduces among many hosts, to compare algorithms where no cluster is at hand. Pure.

All hosts do the same at the same time, so one is simulated, in the manner of LogGP (A. Alexandrov et al., 1995):
its core makes one call after the other, its network card sends one byte after the other, another one receives, and a
message arrives `latency_s` after it has left. Messages have EAGER_MESSAGE_BYTES at most, as transport.mpi.requests
sends them.

    direct  a scatter and a gather with each other host, in chunks, as HierarchicalData
    ring    2 (H - 1) steps of an H-th part to the next host, as Horovod and NCCL over large arrays
    tree    recursive halving and doubling (R. Rabenseifner, 2004), for a number of hosts that is a power of two
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mpistrat.core.tuning import EAGER_MESSAGE_BYTES, HIERARCHICAL_CHUNK_BYTES


@dataclass(frozen=True)
class Network:
    """What a host and its cable take."""

    bytes_per_s: float  # in each direction
    latency_s: float  # of a message, from the call that sends it to the end of that which receives it
    call_s: float = 2.5e-6  # of a core, for a message: to send it, and to receive it
    added_bytes_per_s: float = 4e9  # how many bytes a core adds up


class _Host:
    """Times until which its parts are busy."""

    def __init__(self, network: Network):
        self._network = network
        self.core = self._out = self._in = 0.0

    def call(self, messages: int) -> None:
        self.core += messages * self._network.call_s

    def send(self, nbytes: float) -> float:
        """Send a message, and receive one of the same size. Returns when that has arrived."""
        self.call(1)
        takes = nbytes / self._network.bytes_per_s
        self._out = max(self._out, self.core) + takes
        # What arrives has left its host when this host's has, since all do the same.
        self._in = max(self._in, self._out - takes + self._network.latency_s) + takes
        return self._in

    def exchange(self, nbytes: float, hosts: int = 1) -> float:
        """Send so many bytes to each of some hosts, and receive as many. Returns when all has arrived."""
        count = max(1, math.ceil(nbytes / EAGER_MESSAGE_BYTES))
        self.call(count * hosts)  # the receives
        arrived = 0.0
        for _ in range(hosts * count):
            arrived = self.send(nbytes / count)
        return arrived

    def await_(self, arrived: float, added: float = 0.0) -> None:
        """Wait for what has arrived, and add up so many bytes of it."""
        self.core = max(self.core, arrived) + added / self._network.added_bytes_per_s


def direct(network: Network, hosts: int, nbytes: float, chunk: float = HIERARCHICAL_CHUNK_BYTES) -> float:
    """Seconds of an all-reduce: while a chunk is exchanged, the one before is added up and gathered."""
    host, count = _Host(network), max(1, math.ceil(nbytes / chunk))
    scattered: dict[int, float] = {}
    gathered: dict[int, float] = {}
    part = nbytes / count / hosts
    if hosts == 2:
        part *= 2  # Both hosts add up the whole of it.
    for tick in range(count + 2):
        if tick < count:
            scattered[tick] = host.exchange(part, hosts - 1)
        if 0 <= tick - 1 < count:
            host.await_(scattered[tick - 1], part * (hosts - 1))
            gathered[tick - 1] = host.exchange(part, hosts - 1) if hosts > 2 else host.core
        if 0 <= tick - 2 < count:
            host.await_(gathered[tick - 2])
    return host.core


def ring(network: Network, hosts: int, nbytes: float) -> float:
    """Seconds of an all-reduce, each step of which waits for the one before."""
    host = _Host(network)
    for step in range(2 * (hosts - 1)):
        host.await_(host.exchange(nbytes / hosts), nbytes / hosts if step < hosts - 1 else 0.0)
    return host.core


def tree(network: Network, hosts: int, nbytes: float) -> float:
    """Seconds of an all-reduce, half as many bytes in each round of the scatter as in the one before."""
    host, rounds = _Host(network), round(math.log2(hosts))
    for k in [*range(1, rounds + 1), *range(-rounds, 0)]:
        size = nbytes / 2 ** abs(k)
        host.await_(host.exchange(size), size if k > 0 else 0.0)
    return host.core


def wire(network: Network, hosts: int, nbytes: float) -> float:
    """The least that any of them takes: seconds of the bytes that a host must send."""
    return 2 * (hosts - 1) / hosts * nbytes / network.bytes_per_s


def rows(network: Network, sizes: tuple[float, ...], counts: tuple[int, ...]) -> Iterator[str]:
    for nbytes in sizes:
        for hosts in counts:
            takes = [wire(network, hosts, nbytes), direct(network, hosts, nbytes),
                     direct(network, hosts, nbytes, max(HIERARCHICAL_CHUNK_BYTES, hosts * EAGER_MESSAGE_BYTES)),
                     ring(network, hosts, nbytes), tree(network, hosts, nbytes)]
            yield f"| {nbytes:,.0f} | {hosts} | {' | '.join(f'{1e3 * s:.3g}' for s in takes)} |"


if __name__ == "__main__":
    for name, network in (("1 Gbit/s", Network(1.25e8, 60e-6)), ("25 Gbit/s", Network(3.1e9, 30e-6))):
        print(f"| {name}: bytes | hosts | wire | direct | in larger chunks | ring | tree |")
        print("\n".join(rows(network, (1024, 1e6, 102e6), (8, 32, 128, 512))))
