"""Detects peers that have left or died, and peers on a host that is lost.

One rank, the centre, listens. Each other rank has a connection to the centre, which both ends watch. A peer ends so:

- A peer that *leaves* sends a message with the ranks that it knows to have died.
- A peer that *dies* sends no message. The kernel closes the connection when the process ends, for whatever reason. So
  waiting costs no processor time, needs no limit, and does not depend on MPI, whose collectives need the dead peer.
- A *host is lost* if it is down, or if the link to it is cut: its kernel does not answer the probes of this kernel. A
  kernel answers for a process that is stopped or holds the interpreter's lock, so such a process is not lost.

Used for other hosts of a job (api/job.py), and for all ranks of clusters with parameter servers
(cluster/cluster.py). Agents of elastic jobs also send heartbeats, since a stopped agent keeps no commit.
"""

import enum
import errno
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from .connection import Connection, Listening, connect

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


class End(enum.Enum):
    """How a peer has ended. The value is the text for messages."""

    LEFT = "has left"
    DIED = "has died"
    HOST_LOST = "is on a host that is lost"


@dataclass(frozen=True)
class Invitation:
    """The address at which the centre listens, and the secret."""

    addresses: Sequence[str]  # The addresses of the centre's host.
    port: int  # The port.
    secret: bytes  # Random bytes, which the other ranks must know.


class Peers:
    """The connections of one rank, until `stop` is called.

    `probes`: Seconds between two probes (at least 1), and seconds without an answer after which a host is lost; None:
    the defaults of Connection.
    """

    def __init__(self, rank: int, probes: tuple[float, float] | None = None):
        self._rank, self._probes = rank, probes
        # Ranks that have died, or whose host is lost, as known to this rank and to peers that have left.
        self.died: set[int] = set()
        self._connections: dict[Connection, int] = {}  # of peers that have not ended
        self._left: list[Connection] = []  # of peers that have left, and still want to know when this rank leaves
        self._ends: dict[int, End] = {}
        self._missing: set[int] = set()
        self._changed = threading.Condition()  # guards all of these
        self._listening: Listening | None = None
        self._stopped = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None

    def listen(self, ranks: Sequence[int], addresses: Sequence[str], is_local: bool = False) -> Invitation:
        """On the centre: listen for connections of `ranks`. Local.

        Args:
            ranks: All ranks except the centre.
            addresses: The addresses of this host.
            is_local: Whether all `ranks` are on this host.

        Raises:
            OSError: There is no free port.
        """
        listener = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=1024)
        invitation = Invitation(addresses, listener.getsockname()[1], os.urandom(32))
        with self._changed:  # `_greet` closes `_listening`.
            self._missing = set(ranks)
            self._listening = Listening(listener, invitation.secret, self._greet)
        return invitation

    def await_all(self, limit_s: float) -> None:
        """On the centre: wait until all ranks have connected.

        Raises OSError: No missing rank has connected for `limit_s`.
        """
        with self._changed:
            while missing := len(self._missing):
                if not self._changed.wait_for(lambda: len(self._missing) < missing, limit_s):
                    raise OSError(f"ranks {sorted(self._missing)} have not connected to rank {self._rank}")

    def connect(self, invitation: Invitation, rank: int, limit_s: float) -> Connection:
        """On ranks other than the centre: connect to the centre, `rank`, and return the connection.

        Only this object may read it. Raises OSError: No address answers within `limit_s`. Has an error per address.
        """
        addresses = [(address, invitation.port) for address in invitation.addresses]
        connection = connect(addresses, invitation.secret, limit_s)
        connection.send(rank=self._rank)
        self._watch(connection, rank)
        return connection

    def watch(self, when_ended: Callable[[int, End], None] = lambda *_: None) -> None:
        """Start a thread that watches for the ends of peers.

        `when_ended`: Called with each peer that ends, and with the kind of its end, in this thread.
        """
        self._thread = threading.Thread(target=self._run, args=(when_ended,), name="mpistrat-peers", daemon=True)
        self._thread.start()

    def end_of(self, rank: int, timeout_s: float | None) -> End | None:
        """Wait for the end of a peer, and return how it has ended; None if it has not ended within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._ends, timeout_s)
            return self._ends.get(rank)

    def leave(self) -> None:
        """Tell all peers that this rank leaves, with the ranks that have died. The ends of peers are still noticed."""
        with self._changed:
            self._take_ends()  # To report deaths just before, too.
            for connection in (*self._connections, *self._left):
                connection.send(died=sorted(self.died))

    def stop(self) -> None:
        """Close all connections; `when_ended` is not called afterwards. May be called twice, and in `when_ended`."""
        with self._changed:
            self._stopped.set()
            self._wake.close()  # The thread sees the end of this socket.
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        # The thread may have ended already, or was never started.
        if self._listening is not None:
            self._listening.close()
        for connection in (*self._connections, *self._left):
            connection.close()
        self._woken.close()

    def _greet(self, connection: Connection) -> None:
        try:
            rank = connection.receive()["rank"]
        except OSError:
            return  # The rank has ended already, and stays in `_missing`.
        self._watch(connection, rank)
        with self._changed:
            self._missing.discard(rank)
            if not self._missing and self._listening is not None:
                self._listening.close()
            self._changed.notify_all()

    def _watch(self, connection: Connection, rank: int) -> None:
        if self._probes is not None:
            connection.probe(*self._probes)
        with self._changed:
            if self._stopped.is_set():
                connection.close()
                return
            self._connections[connection] = rank
            self._wake.send(b"\0")

    def _run(self, when_ended: Callable[[int, End], None]) -> None:
        connections: list[Connection] = []
        while not self._stopped.is_set():
            wait([self._woken, *connections])  # type: ignore[list-item]  # that have fileno()
            with self._changed:
                if self._stopped.is_set():
                    return
                if wait([self._woken], 0):
                    self._woken.recv(1 << 10)
                new, connections = self._take_ends(), list(self._connections)
            for rank, end in new:
                if not self._stopped.is_set():
                    when_ended(rank, end)

    def _take_ends(self) -> list[tuple[int, End]]:
        """Read the last messages of peers that have ended. Returns these peers and their ends."""
        found = []
        for connection in self._connections.keys() & wait(self._connections, 0):  # type: ignore[arg-type]
            rank = self._connections.pop(connection)
            try:
                self.died.update(connection.receive()["died"])
                self._left.append(connection)
                end = End.LEFT
            except OSError as error:
                connection.close()
                self.died.add(rank)
                end = End.HOST_LOST if error.errno in _SILENT else End.DIED
            self._ends[rank] = end
            found.append((rank, end))
        self._changed.notify_all()
        return found
