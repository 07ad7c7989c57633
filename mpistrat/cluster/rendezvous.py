"""Form a cluster of the ranks: agree on roles, reserve a port per rank, and find addresses that reach each rank.

All problems are detected before the cluster is created, and raise the same error on every rank.
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..api import runtime
from ..api.ops import allgather_object
from ..core.errors import ClusterError
from ..core.roles import assign_roles, cluster_spec
from ..core.topology import Topology, ranks_by_value
from ..process.addresses import elsewhere, local_addresses
from ..process.peers import Invitation, Peers
from .cluster import Cluster, ReservedPort

_CONNECT_LIMIT_S = 30.0  # for all addresses of the chief
_ACCEPT_LIMIT_S = 30.0  # for the next rank to arrive


@dataclass(frozen=True)
class Offer:
    """The first message of each rank to all others."""

    jobs: Mapping[str, int] | None  # The number of ranks for each role, as given to `form`.
    problem: str  # Why this rank cannot take part; "" if it can.
    port: int  # The reserved port of this rank's server.
    addresses: tuple[str, ...]  # The addresses of this rank's host.
    invitation: Invitation | None  # On the chief, where it listens.


@dataclass(frozen=True)
class Link:
    """The second message of each rank: both addresses of its connection to the chief, or a problem.

    The chief's own Link has no addresses.
    """

    own: str = ""
    chief: str = ""
    problem: str = ""


def form(jobs: Mapping[str, int] | None = None) -> Cluster:
    """Form a cluster of the ranks. Collective.

    Args:
        jobs: As for `core.roles.assign_roles`; the same on all ranks.

    Raises:
        NotInitializedError: Before init().
        ClusterError: On every rank, if the roles do not fit the ranks, a port cannot be had, or ranks cannot reach the
            chief.
    """
    current = runtime.current()
    topology = current.topology
    with contextlib.ExitStack() as on_failure:
        peers = Peers(topology.rank)
        on_failure.callback(peers.stop)
        port, offer = _offer(jobs, topology, peers, on_failure)
        offers: list[Offer] = allgather_object(offer, name="mpistrat.cluster.cluster.offer")
        _raise_together([each.problem for each in offers])
        jobs = offers[0].jobs  # On another rank they may be in another order.
        for rank, each in enumerate(offers):
            if each.jobs != jobs:
                raise ClusterError(f"the ranks disagree on jobs: {jobs} on rank 0, {each.jobs} on rank {rank}.")
        link = Link()
        if topology.rank:
            link = _connect(topology, offers, peers)
        else:
            try:
                peers.await_all(_ACCEPT_LIMIT_S)
            except OSError as error:
                link = Link(problem=str(error))
        links: list[Link] = allgather_object(link, name="mpistrat.cluster.cluster.link")
        _raise_together([each.problem for each in links])
        on_failure.pop_all()
    assert port is not None  # Otherwise _raise_together has raised.
    placed = dataclasses.replace(topology, host_of=addresses_of(topology, links))
    spec = cluster_spec(placed, [each.port for each in offers], jobs)["cluster"]
    return Cluster(topology, assign_roles(topology.size, jobs), spec, port, peers, current)


def addresses_of(topology: Topology, links: Sequence[Link]) -> tuple[str, ...]:
    """The address at which other ranks reach each rank; the host names if there is only one host.

    They come from the connections between hosts. For ranks on the chief's host it is the address at which the first
    rank of another host reached the chief; for other ranks, the address from which they connected.
    """
    chief_host = topology.host_of[0]
    if len(topology.hosts) == 1:
        return topology.host_of
    chief = next(link.chief for link, host in zip(links, topology.host_of) if host != chief_host)
    return tuple(chief if host == chief_host else link.own for link, host in zip(links, topology.host_of))


def _offer(jobs: Mapping[str, int] | None, topology: Topology, peers: Peers,
           on_failure: contextlib.ExitStack) -> tuple[ReservedPort | None, Offer]:
    port, invitation, problem = None, None, ""
    try:
        assign_roles(topology.size, jobs)
        port = ReservedPort()
        on_failure.callback(port.close)
        if topology.rank == 0:
            invitation = peers.listen(range(1, topology.size), local_addresses(), is_local=len(topology.hosts) == 1)
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"a port on {topology.host} cannot be had: {error}."
    return port, Offer(None if jobs is None else dict(jobs), problem, port.number if port else 0, local_addresses(),
                       invitation)


def _connect(topology: Topology, offers: Sequence[Offer], peers: Peers) -> Link:
    chief, host = offers[0], topology.host_of[0]
    if len(topology.hosts) == 1:
        addresses: list[str] = ["127.0.0.1"]
    elif host == topology.host:
        addresses = [*chief.addresses, host]
    else:
        addresses = [*elsewhere(chief.addresses), host]
    assert chief.invitation is not None  # Otherwise _raise_together has raised.
    try:
        line = peers.connect(dataclasses.replace(chief.invitation, addresses=addresses), 0, _CONNECT_LIMIT_S)
    except OSError as error:
        return Link(problem=f"{topology.host} cannot reach {host}, where the chief is ({error}). Is there a "
                            "firewall between them?")
    return Link(line.own[0], line.peer[0])


def _raise_together(problems: Sequence[str]) -> None:
    """Raise ClusterError on every rank if one has a problem."""
    ranks = ranks_by_value(problems)
    ranks.pop("", None)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(problems):
        raise ClusterError(next(iter(ranks)))
    if ranks:
        raise ClusterError("; ".join(f"ranks {where}: {problem}" for problem, where in ranks.items()))
