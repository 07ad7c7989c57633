"""Roles of ranks in a TensorFlow cluster, and the content of TF_CONFIG for them."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from .topology import Topology


class Role(str, Enum):
    """What a rank does in a cluster; the values are the task types of TF_CONFIG."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"


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
