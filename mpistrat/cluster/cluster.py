"""The ranks as a TensorFlow cluster: each has a role, an address, and a port that is reserved for its server.

A formed cluster needs neither the engine nor MPI: each rank has a line to the chief, on which both sides notice the end
of the other (process/peers.py). Made by rendezvous.py; any thread may use it.
"""

import atexit
import logging
import socket
import time
from collections.abc import Mapping, Sequence

from ..api.job import Job
from ..core import forked
from ..core.errors import InvalidRequestError, RankDiedError
from ..core.roles import Role
from ..core.topology import Topology
from ..process import abort
from ..process.peers import End, Peers

logger = logging.getLogger(__name__)

DIED = ("ranks {ranks} have died, so there can be no more collectives among all ranks. This is no error for what needs "
        "none, as training with parameter servers.")
# A rank waits so long before it reports the chief's death. mpirun usually ends the job in that time, and then only the
# chief's own error is printed.
_LAUNCHER_S = 3.0
_REPORT_S = 5.0  # the time after which a rank warns that it waits for the chief without running a server


class ReservedPort:
    """A TCP port of this host that no other program gets, and that a server in this process can bind at any time.

    The port is bound with SO_REUSEPORT and does not listen. The kernel never assigns a bound port to a program that
    requests any free port, neither to listen nor to connect from. It rejects a request for this number, except from the
    same user with SO_REUSEPORT. The server makes such a request, while the port is still reserved, so the port is never
    free in between. All connections go to the server, because this socket does not listen.

    Raises:
        OSError: There is no free port.
    """

    def __init__(self) -> None:
        # gRPC's servers listen on all addresses: with one socket for IPv6 and IPv4 if the host has both.
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
        """Release the port. A server that has bound it keeps it. May be called twice."""
        self._socket.close()


class Cluster:
    """A formed cluster, from the view of one rank."""

    def __init__(self, topology: Topology, roles: Sequence[tuple[Role, int]], spec: Mapping[str, list[str]],
                 port: ReservedPort, peers: Peers, current: Job):
        self.spec = spec  # The addresses of the tasks by role, as in TF_CONFIG.
        # index: Its index among the ranks of that role.
        self.role, self.index = roles[topology.rank]
        self._topology, self._roles = topology, roles
        self._port, self._peers, self._runtime = port, peers, current
        self._is_chief, self._has_left = topology.rank == 0, False
        current.join_cluster()
        self._workers = {rank for rank, (role, _) in enumerate(roles) if role is Role.WORKER}
        self._has_ps = any(role is Role.PS for role, _ in roles)
        peers.watch(self._rank_ended if self._is_chief else lambda *_: None)
        # Registered after init()'s function, so it runs before that.
        atexit.register(self._finish)

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or closed its cluster. Returns False if it has not after `timeout_s`.

        From the first call on, collectives of other ranks that need this rank fail instead of waiting for it.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
            NotInitializedError: This process was forked from a rank.
        """
        forked.require_rank()
        if self._is_chief:
            raise InvalidRequestError("rank 0 is the chief and cannot wait for itself.")
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
        """On the chief: notify all other ranks that the work is done. On others: leave. May be called twice.

        In a process that was forked from a rank it does nothing.
        """
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
        """Let shutdown() not wait for ranks that have died. The chief's farewell lists them."""
        if self._peers.died:
            self._runtime.abandon(DIED.format(ranks=sorted(self._peers.died)))

    def _finish(self) -> None:
        """At the end of the script: close, and on ranks other than the chief wait for it, before shutdown() does."""
        if forked.is_child():
            return
        self.close()
        if not self._is_chief:
            try:
                if self._has_ps and self.role in (Role.WORKER, Role.PS) and not self.wait_for_chief(_REPORT_S):
                    logger.warning("rank %d (%s %d) is at the end of its script, but the chief is not. Without a "
                                   "server here (MPIClusterResolver.serve) the chief may wait for it for ever",
                                   self._topology.rank, self.role.value, self.index)
                self.wait_for_chief()
            except RankDiedError as error:
                abort.uncaught(error)  # Raised in an atexit function it would only be printed.
            self._peers.stop()

    def _rank_ended(self, rank: int, end: End) -> None:
        """On the chief: note the end of a rank before the chief's. In the thread of Peers."""
        role, index = self._roles[rank]
        logger.log(logging.INFO if end is End.LEFT else logging.WARNING, "rank %d (%s %d, on %s) %s before the chief",
                   rank, role.value, index, self._topology.host_of[rank], end.value)
        self._workers.discard(rank)
        if end is not End.LEFT and role is Role.WORKER and not self._workers and self._has_ps:
            # The coordinator would wait for a worker to restart, and none can. An exception in this thread does not end
            # the process, so it goes where an exception of the main thread would go.
            error = RankDiedError("no worker is left; the last one has died.")
            abort.uncaught(error)
