"""The ranks as a cluster in TensorFlow's sense: each has a role, an address, and a port that is held for its server.

`form` is collective; afterwards the cluster needs neither the engine nor MPI. What ends when is told over lifelines.
"""

import atexit
import contextlib
import dataclasses
import errno
import logging
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import runtime, tf_config
from .array_ops import allgather_object
from .errors import ClusterError, InvalidRequestError, RankDiedError
from .lifelines import Lifeline, Lifelines
from .network import HeldPort, local_addresses
from .tf_config import TfConfig
from .topology import Role, Topology, assign_roles, cluster_spec

logger = logging.getLogger(__name__)

DIED = ("ranks {ranks} have died, so there can be no more collectives among all ranks. This is no error for what needs "
        "none, as training with parameter servers.")


@dataclass(frozen=True)
class Offer:
    """What each rank tells all others first. `meeting` is the port of the chief's lifelines."""

    jobs: Mapping[str, int] | None
    config: TfConfig | None
    problem: str
    port: int
    addresses: tuple[str, ...]
    meeting: int
    token: bytes


@dataclass(frozen=True)
class Link:
    """What each rank found when it connected to the chief: both addresses of the connection, or a problem."""

    own: str = ""
    chief: str = ""
    problem: str = ""


class Cluster:
    """A formed cluster, seen from one rank.

    Attributes:
        spec: The addresses of the tasks by role, as in TF_CONFIG.
        role: What this rank does.
        index: Its place among the ranks of its role.
    """

    def __init__(self, topology: Topology, roles: Sequence[tuple[Role, int]], spec: dict[str, Any], port: HeldPort,
                 line: Lifeline | Lifelines, current: runtime.Runtime):
        self.spec = spec
        self.role, self.index = roles[topology.rank]
        self._topology, self._roles = topology, roles
        self._port, self._line, self._runtime = port, line, current
        self._workers = {rank for rank, (role, _) in enumerate(roles) if role is Role.WORKER}
        self._has_ps = any(role is Role.PS for role, _ in roles)
        if isinstance(line, Lifelines):
            line.watch(self._rank_ended)
        # After init()'s, and so run before it.
        atexit.register(self._finish)

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or closed its cluster; whether it has when `timeout_s` has passed.

        From the first call on, collectives of the others that need this rank fail there, and do not wait for it.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
        """
        if isinstance(self._line, Lifelines):
            raise InvalidRequestError("rank 0 is the chief and cannot wait for itself.")
        self._runtime.engine.announce_end()
        died = self._line.wait(timeout_s)
        if died:
            self._runtime.engine.abandon(DIED.format(ranks=list(died)))
        return died is not None

    def close(self) -> None:
        """On the chief: tell all others that the work is done. Elsewhere: leave. May be called twice."""
        if isinstance(self._line, Lifelines):
            died = self._line.close()
            if died:
                self._runtime.engine.abandon(DIED.format(ranks=list(died)))
        else:
            self._line.leave()
        self._port.close()

    def _finish(self) -> None:
        """At the end of the script: close, and elsewhere than on the chief wait for it, as shutdown() is about to do.

        When ranks have died, shutdown() must not wait for them, and that is what the chief tells.
        """
        self.close()
        if isinstance(self._line, Lifeline):
            try:
                self.wait_for_chief()
            except RankDiedError as error:
                sys.excepthook(RankDiedError, error, None)  # Raised here it would be printed, and the rank would go on.
            self._line.close()

    def _rank_ended(self, rank: int, died: bool) -> None:
        """On the chief, in the thread of the lifelines."""
        role, index = self._roles[rank]
        logger.warning("rank %d (%s %d, on %s) has %s before the chief", rank, role.value, index,
                       self._topology.host_of[rank], "died" if died else "left")
        self._workers.discard(rank)
        if role is Role.WORKER and not self._workers and self._has_ps:
            # A coordinator would wait for a worker to come back, and none can. An exception in a thread of its own
            # ends nothing, so it goes where one of the main thread would go.
            error = RankDiedError("no worker is left; all have died or ended before the chief.")
            sys.excepthook(RankDiedError, error, None)


def form(jobs: Mapping[str, int] | None = None) -> Cluster:
    """Make the ranks a cluster. Collective.

    Args:
        jobs: As for `topology.assign_roles`; the same on all ranks. Where TF_CONFIG is set, it says the role of each
            rank, and `jobs` may be left out; if given, the numbers must be the same.

    Raises:
        NotInitializedError: Before init().
        ClusterError: On every rank, if the roles do not fit the ranks, TF_CONFIG is wrong on some rank or does not fit,
            a port is taken, or ranks cannot reach the chief.
    """
    current = runtime.current()
    topology = current.topology
    with contextlib.ExitStack() as on_failure:
        offer, port, meeting = _offer(jobs, topology)
        for resource in (port, meeting):
            if resource is not None:
                on_failure.callback(resource.close)
        offers: list[Offer] = allgather_object(offer, name="mpistrat.cluster.offer")
        _raise_together([each.problem for each in offers])
        roles = _agree(offers)

        line: Lifeline | Lifelines
        if meeting is not None:
            line, link = meeting, Link()
        else:
            line, link = _connect(topology, offers)  # type: ignore[assignment]
            if line is not None:
                on_failure.callback(line.close)
        links: list[Link] = allgather_object(link, name="mpistrat.cluster.link")
        _raise_together([each.problem for each in links])
        _raise_together(allgather_object(_accept(meeting, topology, offer.token), name="mpistrat.cluster.accepted"))

        if offer.config is not None:
            spec: dict[str, Any] = {role: list(addresses) for role, addresses in offer.config.cluster.items()}
        else:
            placed = dataclasses.replace(topology, host_of=addresses_of(topology, links))
            spec = cluster_spec(placed, [each.port for each in offers], jobs)["cluster"]
        assert port is not None
        on_failure.pop_all()
    return Cluster(topology, roles, spec, port, line, current)


def addresses_of(topology: Topology, links: Sequence[Link]) -> tuple[str, ...]:
    """The address of each rank by which others reach it; the names of the hosts if there is only one.

    They are those of connections that were made between hosts: on the chief's host, where the first rank of another
    host reached it, elsewhere, where a rank came from.
    """
    chief_host = topology.host_of[0]
    if len(topology.hosts) == 1:
        return topology.host_of
    chief = next(link.chief for link, host in zip(links, topology.host_of) if host != chief_host)
    return tuple(chief if host == chief_host else link.own for link, host in zip(links, topology.host_of))


def _offer(jobs: Mapping[str, int] | None, topology: Topology) -> tuple[Offer, HeldPort | None, Lifelines | None]:
    config, port, meeting, problem = None, None, None, ""
    try:
        config = tf_config.read(os.environ.get(tf_config.NAME, ""))
        if config is None:
            assign_roles(topology.size, jobs)
        port = HeldPort(config.port if config else 0)
        if topology.rank == 0:
            meeting = Lifelines(len(topology.hosts) == 1, topology.size - 1)
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        wanted = f"port {config.port} of {tf_config.NAME}" if config else "a port"
        taken = error.errno == errno.EADDRINUSE
        problem = f"{wanted} on {topology.host} {'is taken by another program' if taken else 'cannot be had'}: {error}"
    offer = Offer(jobs if jobs is None else dict(jobs), config, problem, port.number if port else 0, local_addresses(),
                  meeting.port if meeting else 0, secrets.token_bytes(32))
    return offer, port, meeting


def _agree(offers: Sequence[Offer]) -> tuple[tuple[Role, int], ...]:
    """The roles, from what all ranks have offered. Raises the same on every rank."""
    jobs = offers[0].jobs
    different = [rank for rank, offer in enumerate(offers) if offer.jobs != jobs]
    if different:
        raise ClusterError(f"the ranks disagree on jobs: {jobs} on rank 0; {offers[different[0]].jobs} on ranks "
                           f"{different}.")
    try:
        return tf_config.check([offer.config for offer in offers], jobs) or assign_roles(len(offers), jobs)
    except ValueError as error:
        raise ClusterError(str(error)) from error


def _connect(topology: Topology, offers: Sequence[Offer]) -> tuple[Lifeline | None, Link]:
    chief, own = offers[0], offers[topology.rank]
    host = topology.host_of[0]
    if len(topology.hosts) == 1:
        addresses = ["127.0.0.1"]
    elif host == topology.host:
        addresses = list(chief.addresses)
    else:
        # An address that both hosts have, of a bridge for containers mostly, leads back to this host.
        addresses = [address for address in chief.addresses if address not in own.addresses]
    try:
        line = Lifeline([*addresses, *([] if len(topology.hosts) == 1 else [host])], chief.meeting, chief.token,
                        topology.rank)
    except OSError as error:
        return None, Link(problem=f"{topology.host} cannot reach {host}, where the chief is ({error}). Is there a "
                                  "firewall between them?")
    return line, Link(line.own_address, line.chief_address)


def _accept(meeting: Lifelines | None, topology: Topology, token: bytes) -> str:
    """On the chief, take the others' connections. Returns a problem, or ""."""
    if meeting is None:
        return ""
    try:
        meeting.accept(range(1, topology.size), token)
    except OSError as error:
        return str(error)
    return ""


def _raise_together(problems: Sequence[str]) -> None:
    """Raise ClusterError on every rank if one has a problem."""
    ranks: dict[str, list[int]] = {}
    for rank, problem in enumerate(problems):
        if problem:
            ranks.setdefault(problem, []).append(rank)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(problems):
        raise ClusterError(next(iter(ranks)))
    if ranks:
        raise ClusterError("; ".join(f"ranks {where}: {problem}" for problem, where in ranks.items()))
