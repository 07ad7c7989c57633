"""Liveness: each rank has a TCP connection to the chief, on which both sides detect the end of the other.

The kernel closes a connection when its process ends, however it ends, and wakes threads that wait for it. So waiting
costs no processor time, needs no timeout, and does not depend on MPI, whose collectives cannot complete without a rank
that has died. A normal end is announced: the chief sends a farewell with the ranks that have died, the other ranks send
that they leave. An end without announcement is a death. Keep-alive probes detect a lost host.

Any process can connect to the chief's port while it listens. The chief rejects connections that do not send the token
of the job. A connection that sends nothing does not delay others.
"""

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from ...core.errors import RankDiedError

_HELLO = struct.Struct("!32sI")
_LEAVING = b"leaving"
_CONNECT_LIMIT_S = 3.0  # for one address; a host that drops packets never answers
_HELLO_LIMIT_S = 10.0
_MAX_UNIDENTIFIED = 128  # connections that have not sent their hello
_ACCEPT_LIMIT_S = 30.0  # for a rank to find an address that works
_MAX_FAREWELL_BYTES = 2**20
# A rank waits so long before it reports the chief's death. mpirun usually ends the job in that time, and then only the
# chief's own error is printed.
_LAUNCHER_S = 3.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # detects a lost host after a minute

_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked process: the kernel ends one only when all processes have closed it."""
    for connection in _open:
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class LivenessServer:
    """The chief's side of all connections.

    Args:
        local: Whether all ranks are on this host.
    """

    def __init__(self, local: bool):
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._connections: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._died: set[int] = set()
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()

    def accept(self, ranks: Sequence[int], token: bytes) -> None:
        """Accept the connections of `ranks`.

        Raises:
            OSError: One has not arrived in time.
        """
        assert self._listener is not None
        missing, until = set(ranks), time.monotonic() + _ACCEPT_LIMIT_S
        self._listener.setblocking(False)
        unidentified: dict[socket.socket, _Hello] = {}  # in the order of arrival
        with contextlib.ExitStack() as at_end, selectors.DefaultSelector() as selector:
            at_end.callback(_close_all, unidentified)
            selector.register(self._listener, selectors.EVENT_READ)
            while missing:
                now = time.monotonic()
                if now >= until:
                    raise OSError(f"no connection of ranks {sorted(missing)} has arrived here")
                for connection in [connection for connection, hello in unidentified.items() if now >= hello.until]:
                    self._reject(connection, unidentified, selector)
                next_s = min([until, *(hello.until for hello in unidentified.values())]) - now
                for key, _ in selector.select(next_s):
                    connection = key.fileobj  # type: ignore[assignment]
                    if connection is self._listener:
                        self._accept_one(unidentified, selector)
                        continue
                    if connection not in unidentified:
                        continue  # It was rejected in this round, to make room for a new one.
                    hello = unidentified[connection].read(connection)
                    if hello is None:
                        continue
                    said, rank = hello
                    if not hmac.compare_digest(said, token) or rank not in missing:
                        self._reject(connection, unidentified, selector)
                        continue
                    del unidentified[connection]
                    selector.unregister(connection)
                    connection.setblocking(True)
                    keep_alive(connection)
                    self._connections[rank] = connection
                    missing.remove(rank)
                    until = time.monotonic() + _ACCEPT_LIMIT_S
        self._listener.close()
        self._listener = None

    def _accept_one(self, unidentified: "dict[socket.socket, _Hello]", selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # The other side has closed it already.
        connection.setblocking(False)
        if len(unidentified) == _MAX_UNIDENTIFIED:
            self._reject(next(iter(unidentified)), unidentified, selector)
        unidentified[connection] = _Hello(time.monotonic() + _HELLO_LIMIT_S)
        selector.register(connection, selectors.EVENT_READ)

    def _reject(self, connection: socket.socket, unidentified: "dict[socket.socket, _Hello]",
                   selector: selectors.BaseSelector) -> None:
        del unidentified[connection]
        selector.unregister(connection)
        connection.close()

    def watch(self, when_ended: Callable[[int, bool], None]) -> None:
        """Start a thread that calls `when_ended(rank, died)` when a rank ends before the chief does."""
        self._thread = threading.Thread(target=self._watch, args=(when_ended,), name="mpistrat-liveness", daemon=True)
        self._thread.start()

    def _watch(self, when_ended: Callable[[int, bool], None]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    selector.unregister(key.fileobj)
                    when_ended(key.data, self._end_of(key.data))

    def _end_of(self, rank: int) -> bool:
        """Read the last message of a rank that has ended; whether it has died."""
        died = _read_to_end(self._connections[rank]) != _LEAVING
        if died:
            self._died.add(rank)
            self._connections.pop(rank).close()
        else:
            self._left.add(rank)
        return died

    def close(self) -> tuple[int, ...]:
        """Send the farewell to all others. Returns the ranks that have died. May be called twice."""
        if self._thread is not None:
            self._wake.send(b"\0")
            self._thread.join()
            self._thread = None
        if self._listener is not None:
            self._listener.close()
        for rank in self._connections.keys() - self._left:
            if _readable(self._connections[rank], 0):
                self._end_of(rank)
        farewell = json.dumps(sorted(self._died)).encode()
        while self._connections:
            _, connection = self._connections.popitem()
            with contextlib.suppress(OSError):  # The rank ends at this moment.
                connection.sendall(farewell)
                connection.shutdown(socket.SHUT_WR)
            connection.close()
        self._wake.close()
        self._woken.close()
        return tuple(sorted(self._died))


class _Hello:
    """The hello of a new connection, as far as it has arrived. It must be complete at the time `until`."""

    def __init__(self, until: float):
        self.until = until
        self._hello = b""

    def read(self, connection: socket.socket) -> tuple[bytes, int] | None:
        """Return token and rank, or None if the hello is not complete. An invalid pair if the connection has ended."""
        try:
            part = connection.recv(_HELLO.size - len(self._hello))
        except BlockingIOError:
            return None
        except OSError:
            part = b""  # The connection was reset.
        self._hello += part
        if len(self._hello) == _HELLO.size:
            said, rank = _HELLO.unpack(self._hello)
            return said, rank
        return None if part else (b"", -1)


class LivenessClient:
    """The side of a rank that is not the chief.

    Args:
        addresses: Addresses of the chief; the first that works is used.
        port: The port on which the chief listens.
        token: 32 bytes that identify the job.
        rank: This rank.

    Raises:
        OSError: The chief cannot be reached; with a connection for each address.
    """

    def __init__(self, addresses: Sequence[str], port: int, token: bytes, rank: int):
        self._connection = connect_to_first([(address, port) for address in addresses])
        self._connection.sendall(_HELLO.pack(token, rank))
        self._connection.settimeout(None)
        keep_alive(self._connection)
        self.own_address: str = self._connection.getsockname()[0]
        self.chief_address: str = self._connection.getpeername()[0]
        self._has_left = False
        self._died: tuple[int, ...] | None = None

    def wait(self, timeout_s: float | None) -> tuple[int, ...] | None:
        """Wait until the chief has ended. Returns the ranks that had died by then, or None after `timeout_s`.

        Raises:
            RankDiedError: The chief has died.
        """
        if self._died is None and _readable(self._connection, timeout_s):
            died = _died_ranks(_read_to_end(self._connection))
            if died is None:
                time.sleep(_LAUNCHER_S)
                raise RankDiedError("rank 0, the chief, has died or was killed.")
            self._died = died
        return self._died

    def leave(self) -> None:
        """Notify the chief that this rank leaves. `wait` still works. May be called twice."""
        if not self._has_left:
            self._has_left = True
            with contextlib.suppress(OSError):  # The chief has ended already.
                self._connection.sendall(_LEAVING)
                self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()


def connect_to_first(addresses: Sequence[tuple[str, int]]) -> socket.socket:
    """Connect to the first of these pairs of address and port that works. Raises OSError with what each has said."""
    reasons, cause = [], None
    for address, port in addresses:
        try:
            return socket.create_connection((address, port), _CONNECT_LIMIT_S)
        except OSError as error:
            reasons.append(f"{address}:{port}: {error}")
            cause = error
    raise OSError("; ".join(reasons) or "it has no address") from cause


def keep_alive(connection: socket.socket) -> None:
    """Send keep-alive probes, which detect a lost host, and close the connection in forked processes."""
    _open.add(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _readable(connection: socket.socket, timeout_s: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _read_to_end(connection: socket.socket) -> bytes:
    """Read until the other side ends. Returns nothing if that is longer than a farewell can be."""
    text = b""
    with contextlib.suppress(OSError):  # A reset: the process was killed with unread data.
        while part := connection.recv(4096):
            text += part
            if len(text) > _MAX_FAREWELL_BYTES:
                return b""
    return text


def _died_ranks(text: bytes) -> tuple[int, ...] | None:
    """The ranks in a farewell; None if the text is incomplete or no farewell."""
    try:
        ranks = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        return None
    return tuple(ranks)
