"""Read TF_CONFIG, which some platforms set for each process, and check it against the ranks. Local."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.roles import Role

NAME = "TF_CONFIG"


@dataclass(frozen=True)
class TfConfig:
    """The content of one rank's TF_CONFIG.

    Attributes:
        cluster: The addresses ("host:port") of the tasks of each role, usually without evaluators.
        role: This rank's role.
        index: This rank's index among the tasks of its role.
    """

    cluster: dict[str, tuple[str, ...]]
    role: Role
    index: int

    @property
    def port(self) -> int:
        """This rank's port, or 0 for an evaluator that is not in the cluster."""
        addresses = self.cluster.get(self.role.value, ())
        return port_of(addresses[self.index]) if addresses else 0

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the chief: the task of that role, or worker 0 of a cluster without that role."""
        first = Role.CHIEF if Role.CHIEF.value in self.cluster else Role.WORKER
        return self.role is first and self.index == 0


def read(text: str) -> TfConfig | None:
    """Parse TF_CONFIG. None if it contains no cluster, as on platforms that set it for a single process.

    Raises:
        ValueError: It is not JSON, or a part is missing or malformed.
    """
    try:
        content = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"{NAME} is not JSON: {error}. Received: {text}") from error
    if not isinstance(content, dict) or not content.get("cluster"):
        return None
    known = [role.value for role in Role]
    try:
        cluster = {str(role): tuple(map(str, addresses)) for role, addresses in content["cluster"].items()}
        role, index = str(content["task"]["type"]), int(content["task"]["index"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f'{NAME} is not {{"cluster": {{role: ["host:port", ...]}}, "task": {{"type": role, '
                         f'"index": number}}}}. Received: {text}') from error
    for name in (*cluster, role):
        if name not in known:
            raise ValueError(f"{NAME}: unknown role {name!r}; the roles are {', '.join(known)}. Received: {text}")
    for addresses in cluster.values():
        for address in addresses:
            port_of(address)
    outside = role == Role.EVALUATOR and role not in cluster
    if index < 0 or not (outside or index < len(cluster.get(role, ()))):
        raise ValueError(f"{NAME}: task {role} {index} is not in the cluster. Received: {text}")
    return TfConfig(cluster, Role(role), index)


def port_of(address: str) -> int:
    """The port of "host:port". Raises ValueError if the text has another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ValueError(f"{NAME}: an address is host:port. Received: {address!r}")
    return int(port)


def check(configs: Sequence[TfConfig | None], jobs: Mapping[str, int] | None) -> tuple[tuple[Role, int], ...] | None:
    """The role and the index of each rank according to TF_CONFIG, or None if no rank has a TF_CONFIG.

    Args:
        configs: The TF_CONFIG of each rank, by rank.
        jobs: The expected number of ranks for each role, if known. The order does not matter.

    Raises:
        ValueError: Some ranks have a TF_CONFIG and others do not; their clusters differ; two ranks have the same task,
            or a task has no rank; rank 0 is not the chief; the numbers are not those of `jobs`.
    """
    given = [(rank, config) for rank, config in enumerate(configs) if config is not None]
    if not given:
        return None
    if len(given) < len(configs):
        missing = [rank for rank, config in enumerate(configs) if config is None]
        raise ValueError(f"{NAME} is set on ranks {[rank for rank, _ in given]}, but not on ranks {missing}. "
                         "Set it on every rank, or on none.")
    clusters: dict[str, list[int]] = {}
    holders: dict[tuple[Role, int], list[int]] = {}
    for rank, config in given:
        clusters.setdefault(json.dumps(config.cluster, sort_keys=True), []).append(rank)
        holders.setdefault((config.role, config.index), []).append(rank)
    if len(clusters) > 1:
        raise ValueError(f"the ranks disagree on the cluster of {NAME}: "
                         + "; ".join(f"{text} on ranks {ranks}" for text, ranks in clusters.items()) + ".")
    for (role, index), ranks in holders.items():
        if len(ranks) > 1:
            raise ValueError(f"{NAME} gives task {role.value} {index} to ranks {ranks}. Each task has one rank.")
    cluster = given[0][1].cluster
    idle = [f"{role} {index}" for role, addresses in cluster.items() for index in range(len(addresses))
            if (Role(role), index) not in holders]
    if idle:
        raise ValueError(f"{NAME} names tasks that no rank has: {', '.join(idle)}; there are {len(configs)} ranks "
                         f"(mpirun -np {len(configs) + len(idle)}).")
    if not given[0][1].is_chief:
        chief = [rank for rank, config in given if config.is_chief]
        raise ValueError(f"{NAME} makes rank 0 {given[0][1].role.value} {given[0][1].index}, but rank 0 is the chief. "
                         f"The chief of {NAME} is on ranks {chief}: name its host first.")
    counts: dict[str, int] = {}
    for role, _ in holders:
        counts[role.value] = counts.get(role.value, 0) + 1
    if jobs is not None and counts != {role: count for role, count in jobs.items() if count}:
        raise ValueError(f"jobs are {dict(jobs)}, but {NAME} has {counts}.")
    return tuple((config.role, config.index) for _, config in given)
