"""Texts about a wait for other ranks that takes too long: the ranks, their hosts, and the likely causes. Pure."""

from collections.abc import Sequence

from .topology import Topology

MOST_LISTED = 6  # The number of hosts, tensors or groups of ranks that a message lists. The others are only counted.
_NOT_RUNNING = "its process is stopped, or something in it keeps Python's global interpreter lock"


def describe_wait(topology: Topology, missing: Sequence[int], waited_s: float) -> str:
    """Return sentences about a wait of this rank that has lasted for `waited_s` seconds.

    `missing` has the ranks that this rank waits for. It may have more ranks, if it is unknown which ranks are late.
    """
    is_one_host = len(topology.hosts) == 1
    who = f"rank {topology.job_rank}" + ("" if is_one_host else f" on {topology.host}")
    wait = f"{who} has waited {waited_s:.0f} s for {describe_ranks(topology, missing)}."
    engine = f"The engine of one of them, at least, does not run: {_NOT_RUNNING}."
    if is_one_host:
        return f"{wait} {engine}"
    if set(missing) <= set(topology.local_ranks):
        return f"{wait} {engine} Or it waits in turn for another host: {network_cause(topology, topology.hosts)}."
    network = network_cause(topology, hosts_of(topology, missing))
    return f"{wait} Either {network}; or the engine of one of these ranks does not run: {_NOT_RUNNING}."


def likely_causes(topology: Topology) -> str:
    """Return a sentence with the likely causes of a wait that is too long, if the late rank is unknown."""
    if len(topology.hosts) == 1:
        return f"The engine of some rank does not run: {_NOT_RUNNING}."
    return f"Either {network_cause(topology, topology.hosts)}; or the engine of some rank does not run: {_NOT_RUNNING}."


def describe_ranks(topology: Topology, ranks: Sequence[int]) -> str:
    """Return `ranks [0, 1]`, with the hosts of the ranks if the job has several hosts."""
    if len(topology.hosts) == 1:
        return f"ranks {topology.listed(ranks)}"
    there: dict[str, list[int]] = {}
    for rank in ranks:
        there.setdefault(topology.host_of[rank], []).append(rank)
    return "ranks " + _listed([f"{topology.listed(some)} on {host}" for host, some in there.items()])


def hosts_of(topology: Topology, ranks: Sequence[int]) -> list[str]:
    """Return the hosts of `ranks`, in the order of the ranks."""
    return list(dict.fromkeys(topology.host_of[rank] for rank in ranks))


def hosts_without(topology: Topology, present: Sequence[int]) -> list[str]:
    """Return the hosts that have none of the ranks in `present`."""
    reached = set(hosts_of(topology, present))
    return [host for host in topology.hosts if host not in reached]


def network_cause(topology: Topology, hosts: Sequence[str]) -> str:
    """Return a clause that names the network between this host and `hosts` as the cause."""
    others = [host for host in hosts if host != topology.host]
    return f"the network between the hosts {topology.host} and {_listed(others)} is down or loses what is sent"


def _listed(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - MOST_LISTED} more hosts" if len(texts) > MOST_LISTED else ""
    return ", ".join(texts[:MOST_LISTED]) + more
