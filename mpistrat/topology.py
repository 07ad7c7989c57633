"""Ranks, hosts and roles as plain data, made from the list of the ranks' hosts. Nothing here communicates."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any


class Role(str, Enum):
    """What a rank does in a cluster; the values are the task types of TF_CONFIG."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"


@dataclass(frozen=True)
class Topology:
    """Where every rank runs, seen from one rank.

    Attributes:
        rank: This process, 0 to size - 1.
        host_of: The host name of each rank, by rank. Ranks with the same name share memory.
    """

    rank: int
    host_of: tuple[str, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.rank < len(self.host_of):
            raise ValueError(f"rank {self.rank} is not in 0..{len(self.host_of) - 1}")

    @cached_property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.host_of)

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The different hosts, in the order of their lowest rank."""
        return tuple(dict.fromkeys(self.host_of))

    @cached_property
    def host(self) -> str:
        """The host of this rank."""
        return self.host_of[self.rank]

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this rank's host, in order."""
        return self.ranks_on(self.host)

    def ranks_on(self, host: str) -> tuple[int, ...]:
        """The ranks on `host`, in order."""
        return tuple(r for r, h in enumerate(self.host_of) if h == host)

    @cached_property
    def local_rank(self) -> int:
        """This rank's position among the ranks of its host."""
        return self.local_ranks.index(self.rank)

    @cached_property
    def local_size(self) -> int:
        """How many ranks this rank's host has."""
        return len(self.local_ranks)

    @cached_property
    def local_sizes(self) -> tuple[int, ...]:
        """How many ranks each host has, in the order of `hosts`."""
        counts = Counter(self.host_of)
        return tuple(counts[host] for host in self.hosts)

    @cached_property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks that have the same local_rank on their hosts, in order. Short hosts are left out."""
        local_rank = self.local_rank
        per_host = (self.ranks_on(host) for host in self.hosts)
        return tuple(sorted(ranks[local_rank] for ranks in per_host if len(ranks) > local_rank))

    @cached_property
    def cross_rank(self) -> int:
        """This rank's position among the ranks of the same local_rank on all hosts."""
        return self.cross_ranks.index(self.rank)

    @cached_property
    def cross_size(self) -> int:
        """How many hosts have a rank of this local_rank."""
        return len(self.cross_ranks)

    @cached_property
    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len(set(self.local_sizes)) == 1


def assign_roles(size: int, jobs: Mapping[str, int] | None = None) -> tuple[tuple[Role, int], ...]:
    """The role and the index within that role of each rank.

    Args:
        size: How many ranks there are.
        jobs: How many ranks each role takes, in the order in which ranks are given out, for example
            `{"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}`. The default is rank 0 as the chief and all others as
            workers.

    Raises:
        ValueError: An unknown role, a negative count, no or several chiefs, a chief that is not rank 0, or counts that
            do not add up to `size`.
    """
    if jobs is None:
        jobs = {"chief": 1, "worker": size - 1}
    known = [role.value for role in Role]
    for name, count in jobs.items():
        if name not in known:
            raise ValueError(f"unknown role {name!r}; the roles are {', '.join(known)}.")
        if count < 0:
            raise ValueError(f"role {name!r} cannot have {count} ranks.")
    if jobs.get("chief", 0) != 1 or next(n for n, c in jobs.items() if c) != "chief":
        raise ValueError(f"exactly one chief is needed, and it is rank 0, so jobs starts with 'chief': 1. "
                         f"Received: {dict(jobs)}.")
    if sum(jobs.values()) != size:
        raise ValueError(f"jobs {dict(jobs)} need {sum(jobs.values())} ranks, but there are {size} "
                         f"(mpirun -np {sum(jobs.values())}).")
    return tuple((Role(name), index) for name, count in jobs.items() for index in range(count))


def cluster_spec(topology: Topology, ports: Sequence[int],
                 jobs: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The content of TF_CONFIG for this rank: `{"cluster": {role: ["host:port", ...]}, "task": {...}}`.

    As TensorFlow wants it, an evaluator is a task but not part of the cluster. When all ranks share one host its
    address is `localhost`, which needs no name service.

    Args:
        topology: Where the ranks run.
        ports: A TCP port for each rank, by rank.
        jobs: As for `assign_roles`.
    """
    roles = assign_roles(topology.size, jobs)
    if len(ports) != topology.size:
        raise ValueError(f"one port for each of {topology.size} ranks is needed. Received: {len(ports)}.")
    alone = len(topology.hosts) == 1
    cluster: dict[str, list[str]] = {}
    for (role, _), host, port in zip(roles, topology.host_of, ports, strict=True):
        if role is not Role.EVALUATOR:
            cluster.setdefault(role.value, []).append(f"{'localhost' if alone else host}:{port}")
    role, index = roles[topology.rank]
    return {"cluster": cluster, "task": {"type": role.value, "index": index}}


def unique_hosts(names: Sequence[str], groups: Sequence[int]) -> tuple[str, ...]:
    """Host names that are equal exactly for the ranks that share memory.

    Args:
        names: The host name of each rank, as its machine calls itself.
        groups: For each rank, a number that is the same for ranks that share memory (their lowest rank).

    Two machines of the same name (containers, mostly) get the group's number appended; one machine whose ranks do not
    share memory counts as several hosts, as MPI_COMM_TYPE_SHARED says.
    """
    groups_of: dict[str, set[int]] = {}
    for name, group in zip(names, groups, strict=True):
        groups_of.setdefault(name, set()).add(group)
    return tuple(name if len(groups_of[name]) == 1 else f"{name}#{group}"
                 for name, group in zip(names, groups, strict=True))
