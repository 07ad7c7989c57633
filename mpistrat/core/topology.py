"""Ranks and hosts as plain data, derived from the host of each rank, and texts that name them. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Topology:
    """Where every rank runs, seen from one rank."""

    rank: int  # This process, 0 to size - 1.
    # The host name of each rank, by rank. Ranks share memory if and only if their host names are equal.
    host_of: tuple[str, ...]
    # For a process set, the ranks of its members in the job, in order; () for all ranks of the job.
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.host_of):
            raise ValueError(f"rank {self.rank} is not in 0..{len(self.host_of) - 1}")

    @cached_property
    def size(self) -> int:
        return len(self.host_of)

    @cached_property
    def job_ranks(self) -> tuple[int, ...]:
        """The number in the job of each rank of this topology. Messages to users have these numbers."""
        return self.members or tuple(range(self.size))

    @property
    def job_rank(self) -> int:
        return self.job_ranks[self.rank]

    def listed(self, ranks: Iterable[int]) -> str:
        """Return these ranks as a text, by their numbers in the job (see rank_list)."""
        return rank_list(self.job_ranks[rank] for rank in ranks)

    def subset(self, ranks: Sequence[int]) -> "Topology":
        """Return the topology of a process set. `ranks` has its ranks in ascending order, this rank among them."""
        return Topology(ranks.index(self.rank), tuple(self.host_of[rank] for rank in ranks), tuple(ranks))

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The hosts, in the order of the lowest rank on each host."""
        return tuple(dict.fromkeys(self.host_of))

    @cached_property
    def host(self) -> str:
        return self.host_of[self.rank]

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this rank's host, in order."""
        return self.ranks_on(self.host)

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(r for r, h in enumerate(self.host_of) if h == host)

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self.host_of[rank] for rank in ranks))

    def hosts_without(self, present: Iterable[int]) -> list[str]:
        """Return the hosts that have none of the ranks in `present`."""
        reached = set(self.hosts_of(present))
        return [host for host in self.hosts if host not in reached]

    @cached_property
    def local_rank(self) -> int:
        """This rank's index among the ranks of its host."""
        return self.local_ranks.index(self.rank)

    @cached_property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """The number of ranks on each host, in the order of `hosts`."""
        return tuple(Counter(self.host_of).values())

    @cached_property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks with the same local_rank as this rank, at most one on each host, in order."""
        local_rank = self.local_rank
        per_host = (self.ranks_on(host) for host in self.hosts)
        return tuple(sorted(ranks[local_rank] for ranks in per_host if len(ranks) > local_rank))

    @cached_property
    def cross_rank(self) -> int:
        """This rank's index in `cross_ranks`."""
        return self.cross_ranks.index(self.rank)

    @cached_property
    def cross_size(self) -> int:
        """The number of hosts that have a rank with this rank's local_rank."""
        return len(self.cross_ranks)

    @cached_property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len(set(self.local_sizes)) == 1


def unique_hosts(names: Sequence[str], groups: Sequence[int]) -> tuple[str, ...]:
    """Return a host name for each rank. Two ranks have the same name if and only if they share memory.

    `names[r]`: The host name of rank r, from its operating system. `groups[r]`: The lowest rank that shares memory with
    rank r. If ranks with one host name are in several groups (mostly in containers), the group is appended to the name.
    So a machine whose ranks do not share memory counts as several hosts, as in MPI_COMM_TYPE_SHARED.
    """
    groups_of: dict[str, set[int]] = {}
    for name, group in zip(names, groups, strict=True):
        groups_of.setdefault(name, set()).add(group)
    return tuple(name if len(groups_of[name]) == 1 else f"{name}#{group}"
                 for name, group in zip(names, groups, strict=True))


def describe_by_rank(values: Sequence[object], form: str = "{value} on ranks {ranks}") -> str:
    """Return which ranks have which value: `3 on ranks [0, 2]; 4 on ranks [1]`. Rank r has `values[r]`."""
    ranks = ranks_by_value(map(str, values))
    return "; ".join(form.format(value=value, ranks=rank_list(where)) for value, where in ranks.items())


def ranks_by_value(values: Iterable[T]) -> dict[T, list[int]]:
    """Return the ranks that have each value. The value of the lowest rank comes first. Rank r has `values[r]`."""
    ranks: dict[T, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


def runs_of(ranks: Iterable[int]) -> list[list[int]]:
    """Split the ranks into runs of consecutive numbers: `[[0, 1, 2], [7]]`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def rank_list(ranks: Iterable[int]) -> str:
    """Return a text like `[0, 1, 2]`. Runs of more than 3 ranks become `4-9`; after 20 items the rest becomes `...`."""
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs_of(ranks)]
    return "[" + ", ".join(texts[:20]) + (", ..." if len(texts) > 20 else "") + "]"


# -- texts about a wait for other ranks that takes too long ------------------------------------------------------------

MOST_LISTED = 6  # The number of hosts, tensors or groups of ranks that a message lists. The others are only counted.
_NOT_RUNNING = "its process is stopped, or some code in it holds Python's global interpreter lock"


def describe_wait(topology: Topology, missing: Sequence[int], waited_s: float) -> str:
    """Return sentences about a wait of this rank that has lasted for `waited_s` seconds.

    `missing`: The ranks that this rank waits for, or may wait for if that is not known exactly.
    """
    is_one_host = len(topology.hosts) == 1
    who = f"rank {topology.job_rank}" + ("" if is_one_host else f" on {topology.host}")
    wait = f"{who} has waited {waited_s:.0f} s for {describe_ranks(topology, missing)}."
    engine = f"The engine of at least one of these ranks does not run: {_NOT_RUNNING}."
    if is_one_host:
        return f"{wait} {engine}"
    if set(missing) <= set(topology.local_ranks):
        return f"{wait} {engine} Or one of the ranks waits for another host: {network_cause(topology, topology.hosts)}."
    network = network_cause(topology, topology.hosts_of(missing))
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


def network_cause(topology: Topology, hosts: Sequence[str]) -> str:
    """Return a clause that names the network between this host and `hosts` as the cause."""
    *first, last = [topology.host, *(host for host in hosts if host != topology.host)]
    named = f"{', '.join(first)} and {last}" if len(first) <= MOST_LISTED else _listed([*first, last])
    return f"the network between the hosts {named} is down or loses what is sent"


def _listed(texts: Sequence[str]) -> str:
    more = f", and {len(texts) - MOST_LISTED} more hosts" if len(texts) > MOST_LISTED else ""
    return ", ".join(texts[:MOST_LISTED]) + more
