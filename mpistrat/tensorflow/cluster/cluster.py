"""The ranks as a cluster in TensorFlow's sense: each has a role, an address, and a port that is held for its server.

Once formed, a cluster needs neither the engine nor MPI. What ends when is told over lifelines.
"""

import atexit
import logging
import sys
from collections.abc import Mapping, Sequence

from ...api.runtime import Runtime
from ...core import forked
from ...core.errors import InvalidRequestError, RankDiedError
from ...core.roles import Role
from ...core.topology import Topology
from .liveness import LivenessClient, LivenessServer
from .ports import ReservedPort

logger = logging.getLogger(__name__)

DIED = ("ranks {ranks} have died, so there can be no more collectives among all ranks. This is no error for what needs "
        "none, as training with parameter servers.")
_REPORT_S = 5.0  # after which a rank says that it waits for the chief where it should serve it


class Cluster:
    """A formed cluster, seen from one rank.

    Attributes:
        spec: The addresses of the tasks by role, as in TF_CONFIG.
        role: What this rank does.
        index: Its place among the ranks of its role.
    """

    def __init__(self, topology: Topology, roles: Sequence[tuple[Role, int]], spec: Mapping[str, list[str]],
                 port: ReservedPort, line: LivenessClient | LivenessServer, current: Runtime):
        self.spec = spec
        self.role, self.index = roles[topology.rank]
        self._topology, self._roles = topology, roles
        self._port, self._line, self._runtime = port, line, current
        current.join_cluster()
        self._workers = {rank for rank, (role, _) in enumerate(roles) if role is Role.WORKER}
        self._has_ps = any(role is Role.PS for role, _ in roles)
        if isinstance(line, LivenessServer):
            line.watch(self._rank_ended)
        # After init()'s, and so run before it.
        atexit.register(self._finish)

    def wait_for_chief(self, timeout_s: float | None = None) -> bool:
        """Wait until the chief has ended or closed its cluster; whether it has when `timeout_s` has passed.

        From the first call on, collectives of the others that need this rank fail there, and do not wait for it.

        Raises:
            RankDiedError: The chief has died.
            InvalidRequestError: This rank is the chief.
            NotInitializedError: This process was forked from a rank.
        """
        forked.require_rank()
        if isinstance(self._line, LivenessServer):
            raise InvalidRequestError("rank 0 is the chief and cannot wait for itself.")
        self._runtime.engine.announce_end()
        died = self._line.wait(timeout_s)
        if died:
            self._runtime.abandon(DIED.format(ranks=list(died)))
        return died is not None

    def close(self) -> None:
        """On the chief: tell all others that the work is done. Elsewhere: leave. May be called twice.

        In a process that was forked from a rank it does nothing.
        """
        if forked.is_child():
            return
        if isinstance(self._line, LivenessServer):
            died = self._line.close()
            if died:
                self._runtime.abandon(DIED.format(ranks=list(died)))
        else:
            self._line.leave()
        self._port.close()

    def _finish(self) -> None:
        """At the end of the script: close, and elsewhere than on the chief wait for it, as shutdown() is about to do.

        When ranks have died, shutdown() must not wait for them, and that is what the chief tells.
        """
        if forked.is_child():
            return
        self.close()
        if isinstance(self._line, LivenessClient):
            try:
                if self._has_ps and self.role in (Role.WORKER, Role.PS) and not self.wait_for_chief(_REPORT_S):
                    logger.warning("rank %d (%s %d) is at the end of its script, but the chief is not. Without a "
                                   "server here (MPIClusterResolver.serve) the chief may wait for it for ever",
                                   self._topology.rank, self.role.value, self.index)
                self.wait_for_chief()
            except RankDiedError as error:
                sys.excepthook(RankDiedError, error, None)  # Raised here it would be printed, and the rank would go on.
            self._line.close()

    def _rank_ended(self, rank: int, died: bool) -> None:
        """On the chief, in the thread of the lifelines."""
        role, index = self._roles[rank]
        logger.log(logging.WARNING if died else logging.INFO, "rank %d (%s %d, on %s) has %s before the chief", rank,
                   role.value, index, self._topology.host_of[rank], "died" if died else "left")
        self._workers.discard(rank)
        if died and role is Role.WORKER and not self._workers and self._has_ps:
            # A coordinator would wait for a worker to come back, and none can. An exception in a thread of its own
            # ends nothing, so it goes where one of the main thread would go.
            error = RankDiedError("no worker is left; the last one has died.")
            sys.excepthook(RankDiedError, error, None)
