"""Forms a TensorFlow cluster of the ranks, and describes the cluster to TensorFlow's own strategies, without TF_CONFIG.

Each rank has a role, an address, and a port that is reserved for its server. Once a cluster is formed, it needs neither
the engine nor MPI: each rank has a connection to the chief, by which the rank and the chief notice each other's end
(process/peers.py). Any thread may use the cluster.
"""

import atexit
import contextlib
import dataclasses
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from .api import runtime
from .api.array_ops import allgather_object
from .api.job import Job
from .core import forked
from .core.errors import ClusterError, InvalidRequestError, RankDiedError
from .core.roles import Role, assign_roles, cluster_spec
from .core.topology import Topology, ranks_by_value
from .process import abort
from .process.cores import own_cpus
from .process.peers import End, Invitation, Peers, elsewhere, local_addresses

logger = logging.getLogger(__name__)

# The time that a rank waits before it reports the chief's death. mpirun usually ends the job in that time, so that only
# the chief's own error is printed.
_LAUNCHER_S = 3.0
_REPORT_S = 5.0  # The time after which a rank warns that it waits for the chief without running a server.
_CONNECT_LIMIT_S = 30.0  # The limit for a connection to the chief, over all its addresses.
_ACCEPT_LIMIT_S = 30.0  # The limit for the next rank to connect.


class ReservedPort:
    """A TCP port of this host that no other program gets, and that a server in this process can bind at any time.

    A socket of this object is bound to the port with SO_REUSEPORT, and does not listen. The kernel never assigns a
    bound port to a program that requests any free port. It rejects a request for this port number unless the request
    uses SO_REUSEPORT and comes from the same user. The server makes such a request before the port is released, so the
    port is never free in between. All connections go to the server, because the socket here does not listen.

    Raises OSError: There is no free port.
    """

    def __init__(self) -> None:
        # gRPC's servers listen on all addresses, with one socket for IPv6 and IPv4 if the host has both.
        both = socket.has_dualstack_ipv6()
        self._socket = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
        try:
            if both:
                self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(("", 0))
        except OSError:
            self._socket.close()
            raise
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Release the port. A server that has bound the port keeps the port. A second call does nothing."""
        self._socket.close()


class Cluster:
    """A formed cluster, from the view of one rank."""

    def __init__(self, topology: Topology, roles: Sequence[tuple[Role, int]], spec: Mapping[str, list[str]],
                 port: ReservedPort, peers: Peers, current: Job):
        self.spec = spec  # The addresses of the tasks by role, as in TF_CONFIG.
        self.role, self.index = roles[topology.rank]  # The index is among the ranks of the same role.
        self._topology, self._roles = topology, roles
        self._port, self._peers, self._runtime = port, peers, current
        self._is_chief, self._has_left = topology.rank == 0, False
        current.join_cluster()
        self._workers = {rank for rank, (role, _) in enumerate(roles) if role is Role.WORKER}
        self._has_ps = any(role is Role.PS for role, _ in roles)
        peers.watch(self._rank_ended if self._is_chief else lambda *_: None)
        # Registered after init()'s exit function, so it runs before that function.
        atexit.register(self._finish)

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or has left the cluster; see MPIClusterResolver.wait_for_chief.

        After the first call, collectives among all ranks fail. Raises NotInitializedError in a forked process.
        """
        forked.require_rank()
        if self._is_chief:
            raise InvalidRequestError("rank 0 is the chief. Call wait_for_chief() on other ranks only.")
        self._runtime.engine.announce_end()
        end = self._peers.end_of(0, timeout_s)
        if end is None:
            return False
        if end is not End.LEFT:
            time.sleep(_LAUNCHER_S)
            raise RankDiedError(f"rank 0, the chief, {end.value}.")
        self._abandon_collectives()
        return True

    def close(self) -> None:
        """Leave the cluster; see MPIClusterResolver.close. Does nothing in a process that was forked from a rank."""
        if forked.is_child():
            return
        if not self._has_left:
            self._has_left = True
            self._peers.leave()
        if self._is_chief:
            self._peers.stop()
            self._abandon_collectives()
        self._port.close()

    def _abandon_collectives(self) -> None:
        """Make shutdown() not wait for dead ranks. When the chief leaves, it tells the others which ranks are dead."""
        if self._peers.died:
            self._runtime.abandon(
                f"ranks {sorted(self._peers.died)} have died, so collectives among all ranks are not possible any more."
                " Work without collectives, such as training with parameter servers, can continue.")

    def _finish(self) -> None:
        """Leave the cluster, and wait until the chief has left too. Runs when Python exits, before shutdown()."""
        if forked.is_child():
            return
        self.close()
        if not self._is_chief:
            try:
                if self._has_ps and self.role in (Role.WORKER, Role.PS) and not self.wait_for_chief(_REPORT_S):
                    logger.warning("rank %d (%s %d) is at the end of its script, but the chief is not. Without a "
                                   "server on this rank (MPIClusterResolver.serve) the chief may wait for ever",
                                   self._topology.rank, self.role.value, self.index)
                self.wait_for_chief()
            except RankDiedError as error:
                abort.uncaught(error)  # Raised in an atexit function, the error would only be printed.
            self._peers.stop()

    def _rank_ended(self, rank: int, end: End) -> None:
        """Log that a rank has ended. If there are ps and the last worker has died, end the job. Runs on the chief."""
        role, index = self._roles[rank]
        logger.log(logging.INFO if end is End.LEFT else logging.WARNING, "rank %d (%s %d, on %s) %s; the chief runs on",
                   rank, role.value, index, self._topology.host_of[rank], end.value)
        self._workers.discard(rank)
        if end is not End.LEFT and role is Role.WORKER and not self._workers and self._has_ps:
            # The coordinator would wait for a worker to restart, but no worker can. An exception in this thread would
            # not end the process, so the error is treated as an uncaught exception of the main thread.
            abort.uncaught(RankDiedError("no worker is left; the last one has died."))


# -- how ranks form a cluster ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Offer:
    """The first message of each rank to all other ranks, when a cluster is formed."""

    jobs: Mapping[str, int] | None  # The number of ranks for each role, as given to `form`.
    problem: str  # The reason why this rank cannot take part; "" if it can.
    port: int  # The reserved port of this rank's server.
    addresses: tuple[str, ...]  # The addresses of this rank's host.
    invitation: Invitation | None  # How to connect to the chief; None on other ranks.


@dataclass(frozen=True)
class Link:
    """The second message of each rank: the two addresses of its connection to the chief, or why it has none."""

    own: str = ""  # On the chief, both addresses are "".
    chief: str = ""
    problem: str = ""


def form(jobs: Mapping[str, int] | None = None) -> Cluster:
    """Form a cluster of the ranks. Collective. MPIClusterResolver describes `jobs` and the errors."""
    current = runtime.current()
    topology = current.topology
    with contextlib.ExitStack() as on_failure:
        peers = Peers(topology.rank)
        on_failure.callback(peers.stop)
        port, offer = _offer(jobs, topology, peers, on_failure)
        offers: list[Offer] = allgather_object(offer, name="mpistrat.cluster.cluster.offer")
        _raise_together([each.problem for each in offers])
        jobs = offers[0].jobs  # Another rank may have its roles in another order.
        for rank, each in enumerate(offers):
            if each.jobs != jobs:
                raise ClusterError(f"the ranks pass different `jobs`: {jobs} on rank 0, {each.jobs} on rank {rank}.")
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
    """Return for each rank the address at which other ranks reach it, or its host name if there is only one host.

    All ranks on the chief's host have one address: the one at which the first rank on another host has reached the
    chief. Any other rank has the address from which it has connected to the chief.
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
        problem = f"a port on {topology.host} cannot be reserved: {error}."
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
        connection = peers.connect(dataclasses.replace(chief.invitation, addresses=addresses), 0, _CONNECT_LIMIT_S)
    except OSError as error:
        return Link(problem=f"{topology.host} cannot reach {host}, where the chief is ({error}). Is there a "
                            "firewall between them?")
    return Link(connection.own[0], connection.peer[0])


def _raise_together(problems: Sequence[str]) -> None:
    """Raise ClusterError on every rank if any rank has a problem. `problems`: A text for each rank, "" for none."""
    ranks = ranks_by_value(problems)
    ranks.pop("", None)
    if len(ranks) == 1 and len(next(iter(ranks.values()))) == len(problems):
        raise ClusterError(next(iter(ranks)))
    if ranks:
        raise ClusterError("; ".join(f"ranks {where}: {problem}" for problem, where in ranks.items()))


# -- MPIClusterResolver ------------------------------------------------------------------------------------------------

class MPIClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """Assigns roles to the ranks, gathers their addresses over MPI, and reserves a port for the server of each rank.

        hvd.init()
        resolver = MPIClusterResolver({"chief": 1, "worker": 2, "ps": 1})
        if resolver.task_type in ("worker", "ps"):
            resolver.serve()          # returns when the chief has ended
        else:
            strategy = tf.distribute.ParameterServerStrategy(resolver)

    The constructor is collective. The methods are not, so any rank may call them at any time. Ranks other than the
    chief serve the cluster until the chief calls `close`, or until the chief's script ends.

    If all ranks are on one host, the address of each rank is `localhost`. Otherwise it is the address that the host of
    the rank uses for the connection to the chief. TF_CONFIG is ignored, because the tasks are the ranks of mpirun.

    Args:
        jobs: The number of ranks for each role. Ranks get their roles in the order of the dict, and the chief is
            first. Default: rank 0 is the chief, all other ranks are workers.
        num_accelerators: The number of devices of each kind in each task, for example `{"GPU": 1}`. Default: the GPUs
            that this process sees.
        rpc_layer: The protocol of the servers.

    Raises:
        NotInitializedError: Before init().
        ClusterError: On every rank, if `jobs` is invalid or differs among the ranks, there is no free port, or a rank
            cannot reach the chief.
    """

    def __init__(self, jobs: Mapping[str, int] | None = None, num_accelerators: Mapping[str, int] | None = None,
                 rpc_layer: str = "grpc"):
        self._cluster = form(jobs)
        self._task_type, self._task_id = self._cluster.role.value, self._cluster.index
        self._num_accelerators = None if num_accelerators is None else dict(num_accelerators)
        self.rpc_layer = rpc_layer
        self._server: tf.distribute.Server | None = None
        # TensorFlow reads these variables when it starts its first server.
        os.environ["TF_GRPC_REUSE_PORT"] = "1"  # Without it gRPC's servers cannot bind a reserved port.
        if Role.PS.value in self._cluster.spec:
            os.environ["GRPC_FAIL_FAST"] = "use_caller"  # Calls to a worker that has died fail instead of waiting.

    @property
    def task_type(self) -> str:
        """This rank's role: "chief", "worker", "ps" or "evaluator"."""
        return self._task_type

    @property
    def task_id(self) -> int:
        """This rank's index among the tasks of its role, from 0."""
        return self._task_id

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Return the addresses of all tasks. Evaluators are left out, as TensorFlow requires."""
        return tf.train.ClusterSpec(self._cluster.spec)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the URL of the server of a task (default: this rank's); "" for an evaluator, which has no server."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type not in self._cluster.spec:
            return ""
        layer = rpc_layer or self.rpc_layer
        address = self.cluster_spec().task_address(task_type, task_id)
        return f"{layer}://{address}" if layer else str(address)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None,
                         config_proto: tf.compat.v1.ConfigProto | None = None) -> dict[str, int]:
        """Return the number of devices of each kind in a task. The result is the same for all tasks."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return {"GPU": len(tf.config.get_visible_devices("GPU"))}

    def serve(self) -> None:
        """Run this rank's tf.distribute.Server until the chief has ended. Only workers and ps may call it.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is neither a worker nor a ps.
        """
        if self._cluster.role not in (Role.WORKER, Role.PS):
            raise InvalidRequestError(f"a {self.task_type} has no server to run; serve() is for workers and ps.")
        # TensorFlow's default is a thread for each core. With one core, a function that waits for values of another
        # task takes the thread that would receive the values, and waits for ever. TensorFlow's tutorial also sets it:
        # https://www.tensorflow.org/tutorials/distribute/parameter_server_training#in-process_cluster
        threads = max(len(own_cpus()), sum(map(len, self._cluster.spec.values())) + 1)
        self._server = tf.distribute.Server(self.cluster_spec(), job_name=self.task_type, task_index=self.task_id,
                                            protocol=self.rpc_layer,
                                            config=tf.compat.v1.ConfigProto(inter_op_parallelism_threads=threads))
        self._cluster.wait_for_chief()

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or has called close(). Returns False after `timeout_s`, otherwise True.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
        """
        return self._cluster.wait_for_chief(timeout_s)

    def close(self) -> None:
        """Leave the cluster. When the chief leaves, serve() and wait_for_chief() of the other ranks return.

        Python calls close() at the end of the script. A second call does nothing.
        """
        self._cluster.close()
