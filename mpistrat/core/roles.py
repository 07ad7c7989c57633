"""Roles of ranks in a TensorFlow cluster, and the content of TF_CONFIG for them. Pure."""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from .topology import Topology


class Role(str, Enum):
    """The role of a rank in a cluster. The values are the task types of TF_CONFIG."""

    CHIEF = "chief"
    WORKER = "worker"
    PS = "ps"
    EVALUATOR = "evaluator"


def assign_roles(size: int, jobs: Mapping[str, int] | None = None) -> tuple[tuple[Role, int], ...]:
    """Return the (role, index within the role) of each of `size` ranks.

    `jobs` has the number of ranks for each role, in rank order, for example `{"chief": 1, "worker": 2, "ps": 1,
    "evaluator": 1}`. Default: rank 0 is the chief, all others are workers.

    Raises ValueError: A role is unknown, a count is negative, there is not exactly one chief, the chief is not rank 0,
    or the counts do not add up to `size`.
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
        raise ValueError(f"exactly one chief is needed, and it is rank 0, so begin `jobs` with 'chief': 1. "
                         f"Received: {dict(jobs)}.")
    if sum(jobs.values()) != size:
        raise ValueError(f"jobs {dict(jobs)} need {sum(jobs.values())} ranks, but there are {size} "
                         f"(mpirun -np {sum(jobs.values())}).")
    return tuple((Role(name), index) for name, count in jobs.items() for index in range(count))


def cluster_spec(topology: Topology, ports: Sequence[int],
                 jobs: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the content of TF_CONFIG for this rank: `{"cluster": {role: ["host:port", ...]}, "task": {...}}`.

    As TensorFlow requires, an evaluator is a task but not part of the cluster. If all ranks are on one host, addresses
    are `localhost`, which needs no name service. `ports` has a TCP port for each rank. For `jobs` see assign_roles.
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
