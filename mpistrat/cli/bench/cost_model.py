"""A model of the time of an all-reduce, from latency and bandwidth, and its fit to measurements.

The model is Hockney's (R. Hockney, "The communication challenge for MPP", Parallel Computing 20, 1994): a message of m
bytes takes alpha + m / beta. For H hosts of L ranks, an all-reduce of m bytes per rank takes

    negotiation   2 ceil(log_16 N) alpha_n      up and down the tree of N = H L ranks
    in the host   alpha_h + m / beta_h          pack, reduce, unpack: every rank at the same time
    across hosts  2 (H - 1) alpha_w + 2 (H - 1) / H m / beta_w

The last line is the exchange of slices, in which each host sends 2 (H - 1) / H of its bytes, which is the minimum
(P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009). Chunks are pipelined, so only the
longer of the bandwidth terms, in the host and across hosts, counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.tuning import FAN_OUT


@dataclass(frozen=True)
class Machine:
    """Parameters of the model.

    Attributes:
        host_latency_s: Time of an empty all-reduce among the ranks of a host, negotiation included.
        host_bandwidth: Bytes that each rank of a host reduces per second.
        wire_latency_s: Time of a short message between two hosts.
        wire_bandwidth: Bytes per second of a host's link, in each direction.
        ranks_per_host: Number of ranks on each host.
    """

    host_latency_s: float
    host_bandwidth: float
    wire_latency_s: float = 5e-6
    wire_bandwidth: float = 12.5e9
    ranks_per_host: int = 8


def allreduce_s(machine: Machine, ranks: int, nbytes: float) -> float:
    """Return the predicted seconds of an all-reduce of `nbytes` on each of `ranks` ranks."""
    hosts = math.ceil(ranks / machine.ranks_per_host)
    in_host = nbytes / machine.host_bandwidth if ranks > 1 else 0.0
    if hosts == 1:
        return (machine.host_latency_s if ranks > 1 else 0.0) + in_host
    levels = math.ceil(math.log(ranks, FAN_OUT))
    latency = machine.host_latency_s + 2 * levels * machine.wire_latency_s + 2 * (hosts - 1) * machine.wire_latency_s
    return latency + max(in_host, 2 * (hosts - 1) / hosts * nbytes / machine.wire_bandwidth)


def efficiency(machine: Machine, ranks: int, nbytes: float, step_s: float, overlap: float = 0.0) -> float:
    """Return the predicted efficiency of training: step time without averaging over step time with averaging.

    Args:
        machine: Parameters of the model.
        ranks: Number of ranks.
        nbytes: Bytes of the gradients.
        step_s: Seconds of a step without averaging.
        overlap: The fraction of the averaging that overlaps with the backward pass, from 0 to 1.
    """
    return step_s / (step_s + (1 - overlap) * allreduce_s(machine, ranks, nbytes))


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the latency in seconds and the bandwidth in bytes per second that fit the measured (bytes, seconds).

    The fit minimises the squares of the relative errors, because the times span orders of magnitude.

    Raises:
        ValueError: There are fewer than two different sizes, or the time does not grow with the size.
    """
    sizes, seconds = np.array(points, np.float64).T if len(points) else (np.empty(0), np.empty(0))
    if len(set(sizes.tolist())) < 2:
        raise ValueError("a fit needs measurements of two sizes at least.")
    system = np.stack([1 / seconds, sizes / seconds], axis=1)
    (latency, per_byte), *_ = np.linalg.lstsq(system, np.ones(len(points)))
    if per_byte <= 0:
        raise ValueError("the time does not grow with the size; repeat the measurement on a quiet machine.")
    return max(float(latency), 0.0), 1 / float(per_byte)
