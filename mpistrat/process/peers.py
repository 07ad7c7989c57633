"""Detects ranks that have left or died, or whose host is lost: by their processes, or by connections between ranks.

If a rank ends, mpirun usually ends the job within half a second. mpirun does not if a shell around the rank still runs,
or if the job is to continue without the rank. Ranks that wait in shared memory do not notice the end.
"""

import contextlib
import enum
import errno
import fcntl
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from ..core.tuning import LAUNCHER_POLL_S
from .connection import Connection, Listening, connect
from .procfs import Process

logger = logging.getLogger(__name__)

# -- the ranks of this host --------------------------------------------------------------------------------------------
# The kernel reports the end of a process by a descriptor (pidfd, from Linux 5.3 on). Without pidfd the processes are
# polled. A process that is stopped, or busy, has not ended. One other rank looks in /proc whether a process is stopped.
# Ranks in containers with a separate pid namespace are not watched: here their pid is that of another process, with
# another start time.

_LOOK_S = 0.05  # between two checks of the launcher's reports on ranks that are not watched by process
_STOP_LOOK_S = 1.0  # between two checks whether a process is stopped; a check costs 0.02 ms


class Neighbours:
    """A thread that calls `when_ended` with ranks that have ended, once for each rank, until `stop` is called.

    Args:
        processes: The process of each other rank of this host.
        others: All other ranks, including ranks of other hosts.
        when_ended: Called in the thread of this object. It must not call `stop`.
        reported: Returns the ranks that have ended according to another source, such as MPI. Called 20 times a second
            if some ranks' processes cannot be watched; None: there is no other source.
        beside: The rank whose process is also checked for a stop (SIGSTOP); None: no rank.
        when_stopped: Called each second while that process is stopped, with `beside` and the length of the stop so far.
            Seconds in which this process is stopped too do not count. Called with 0.0 after the stop.
    """

    def __init__(self, processes: Mapping[int, Process], others: Collection[int],
                 when_ended: Callable[[list[int]], None], reported: Callable[[], Collection[int]] | None = None,
                 beside: int | None = None, when_stopped: Callable[[int, float], None] = lambda *_: None):
        self._when_ended = when_ended
        self._beside = None if beside is None else (beside, processes[beside])
        self._when_stopped = when_stopped
        self._stopped_looks = 0
        self._known: set[int] = set()
        self._poller = select.poll()
        self._descriptors: dict[int, int] = {}  # pidfd: rank
        self._processes: dict[int, Process] = {}  # of ranks without a pidfd
        for rank, process in processes.items():
            try:
                descriptor = os.pidfd_open(process.pid)
            except OSError:  # An older kernel, a container that forbids it, or no process of that number.
                if process.is_alive():
                    self._processes[rank] = process
                continue
            if process.is_alive():
                self._descriptors[descriptor] = rank
                self._poller.register(descriptor, select.POLLIN)
            else:
                os.close(descriptor)  # Of another process, in another container.
        is_blind = len(self._descriptors) + len(self._processes) < len(others)
        self._reported = reported if is_blind else None
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._poller.register(self._stopped, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="mpistrat-neighbours", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. No call of `when_ended` follows. `stop` may be called twice, but not in `when_ended`."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            self._thread.join()
            for descriptor in (self._stopped, *self._descriptors):
                os.close(descriptor)
            self._descriptors.clear()

    def _run(self) -> None:
        wait_s = [_LOOK_S] * (self._reported is not None) + [LAUNCHER_POLL_S] * bool(self._processes)
        wait_s += [_STOP_LOOK_S] * (self._beside is not None)
        look_at = time.monotonic() + _STOP_LOOK_S
        while True:
            ready = [descriptor for descriptor, _ in self._poller.poll(min(wait_s) * 1000 if wait_s else None)]
            if self._stopped in ready:
                return
            ended = {self._descriptors[descriptor] for descriptor in ready}
            ended |= {rank for rank, process in self._processes.items() if not process.is_alive()}
            ended |= set(self._reported() if self._reported is not None else ())
            for descriptor in ready:
                self._poller.unregister(descriptor)
            new = sorted(ended - self._known)
            if new:
                self._known |= ended
                self._when_ended(new)
            if time.monotonic() >= look_at:
                if self._beside is not None:
                    self._look_at(*self._beside)
                look_at = time.monotonic() + _STOP_LOOK_S

    def _look_at(self, rank: int, process: Process) -> None:
        if process.is_stopped():
            self._stopped_looks += 1
            self._when_stopped(rank, self._stopped_looks * _STOP_LOOK_S)
        elif self._stopped_looks:
            self._stopped_looks = 0
            if rank not in self._known:
                self._when_stopped(rank, 0.0)


# -- ranks by connection -----------------------------------------------------------------------------------------------
# One rank, the centre, listens. Each other rank has a connection to the centre, which both ends watch. These are the
# first ranks of the hosts of a job (api/job.py), or all ranks of a cluster with parameter servers
# (cluster.py). Agents of elastic jobs also send heartbeats, since a stopped agent keeps no commit. A peer ends
# in one of these ways:
# - A peer that *leaves* sends a message with the ranks that it knows to have died.
# - A peer that *dies* sends no message. The kernel closes the connection when the process ends, for whatever reason. So
#   waiting costs no processor time, needs no limit, and does not depend on MPI, whose collectives need the dead peer.
# - A *host is lost* if it is down, or if the link to it is cut: its kernel does not answer the probes of this kernel. A
#   kernel answers for a process that is stopped or holds the interpreter's lock, so such a process is not lost.

_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface


def local_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this host, without loopback addresses, in the order of its interfaces."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # The interface is down, or has no IPv4 address.
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return tuple(address for address in found if not address.startswith("127."))


def elsewhere(addresses: Iterable[str]) -> list[str]:
    """Return the `addresses` of another host without those that this host has too, such as container bridges."""
    own = local_addresses()
    return [address for address in addresses if address not in own]


class End(enum.Enum):
    """How a peer has ended. The value is the text for messages."""

    LEFT = "has left"
    DIED = "has died"
    HOST_LOST = "is on a host that is lost"


@dataclass(frozen=True)
class Invitation:
    """The address at which the centre (see Peers) listens, and a secret that the other ranks must know."""

    addresses: Sequence[str]  # of the centre's host
    port: int
    secret: bytes


class Peers:
    """The connections of this rank. One rank, the centre, is connected to all others, which have no other connection.

    `probes`: Seconds between two keep-alive probes (at least 1), and seconds without an answer after which a host is
    lost; None: the defaults of Connection.
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
        """On the centre: accept connections of `ranks`, which are all ranks except the centre. Local.

        `addresses`: The addresses of this host. `is_local`: Whether all `ranks` are on this host.

        Raises OSError: There is no free port.
        """
        listener = socket.create_server(("127.0.0.1" if is_local else "", 0), backlog=1024)
        invitation = Invitation(addresses, listener.getsockname()[1], os.urandom(32))
        with self._changed:  # `_greet` closes `_listening`.
            self._missing = set(ranks)
            self._listening = Listening(listener, invitation.secret, self._greet)
        return invitation

    def await_all(self, limit_s: float) -> None:
        """On the centre: wait until all ranks have connected. Raises OSError: For `limit_s` no rank connects."""
        with self._changed:
            while missing := len(self._missing):
                if not self._changed.wait_for(lambda: len(self._missing) < missing, limit_s):
                    raise OSError(f"ranks {sorted(self._missing)} have not connected to rank {self._rank}")

    def connect(self, invitation: Invitation, rank: int, limit_s: float) -> Connection:
        """On a rank other than the centre: connect to the centre `rank`. Only this object may read from the connection.

        Raises OSError: No address answers within `limit_s`. The message has an error for each address.
        """
        addresses = [(address, invitation.port) for address in invitation.addresses]
        connection = connect(addresses, invitation.secret, limit_s)
        connection.send(rank=self._rank)
        self._watch(connection, rank)
        return connection

    def watch(self, when_ended: Callable[[int, End], None] = lambda *_: None) -> None:
        """Start a thread that calls `when_ended(rank, end)` for each peer that ends, until `stop` is called."""
        self._thread = threading.Thread(target=self._run, args=(when_ended,), name="mpistrat-peers", daemon=True)
        self._thread.start()

    def end_of(self, rank: int, timeout_s: float | None) -> End | None:
        """Wait until a peer has ended, and return how it has ended; None if it has not ended within `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: rank in self._ends, timeout_s)
            return self._ends.get(rank)

    def leave(self) -> None:
        """Tell all peers that this rank leaves, and which ranks have died. The thread of `watch` continues."""
        with self._changed:
            self._take_ends()  # To report deaths just before, too.
            for connection in (*self._connections, *self._left):
                connection.send(died=sorted(self.died))

    def stop(self) -> None:
        """Close all connections. No call of `when_ended` follows. `stop` may be called twice, and in `when_ended`."""
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
        """Find the peers that have ended since the last call. Return their ranks, and how they have ended."""
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
