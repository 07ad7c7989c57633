"""Notices that another host does not answer any more: it is down, or the link to it is cut.

The first rank of each host has a connection to the first rank of the job. The kernels probe it and answer, whatever the
processes do: one that is stopped, or holds the interpreter's lock, is no silent host. The processes send nothing but a
hello. The end of a process closes its connection, which tells nothing here.

Any process can connect while the first rank listens. It rejects those that do not send the secret of the job.
"""

import contextlib
import errno
import fcntl
import hmac
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_SECRET_BYTES = 32
_HELLO_BYTES = _SECRET_BYTES + 4  # the secret, and the sender's rank
_CONNECT_LIMIT_S = 3.0  # for one address
_LISTEN_S = 60.0  # in which the first ranks of all hosts connect
_MOST_STRANGERS = 128  # connections that have not said hello
_SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


@dataclass(frozen=True)
class Invitation:
    """Where the first rank of the job listens, for the first ranks of the other hosts.

    Attributes:
        addresses: The addresses of its host.
        port: The port.
        secret: What they send.
    """

    addresses: Sequence[str]
    port: int
    secret: bytes


class SilentHosts:
    """The connections of one rank, until `stop` is called. A thread of this object waits for them.

    Args:
        rank: This rank.
        heartbeat_s: Seconds between two probes, at least 1.
        limit_s: Seconds without an answer after which a host is silent.
        when_silent: Called with the rank at the other end, in that thread. It must not call `stop`.
    """

    def __init__(self, rank: int, heartbeat_s: float, limit_s: float, when_silent: Callable[[int], None]):
        self._rank, self._heartbeat_s, self._limit_s, self._when_silent = rank, heartbeat_s, limit_s, when_silent
        self._peers: dict[socket.socket, int] = {}
        self._stopped, self._stop = os.pipe2(os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stopped, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None

    def listen(self, ranks: Sequence[int], addresses: Sequence[str]) -> Invitation:
        """On the first rank of the job: expect connections of these ranks, the first of the other hosts. Local.

        Raises:
            OSError: There is no free port.
        """
        listener = socket.create_server(("", 0), backlog=len(ranks) + _MOST_STRANGERS)
        secret = os.urandom(_SECRET_BYTES)
        listener.setblocking(False)
        self._start(lambda: self._accept(listener, secret, set(ranks)))
        return Invitation(addresses, listener.getsockname()[1], secret)

    def connect(self, invitation: Invitation, first: int) -> None:
        """On the first rank of another host: connect to rank `first`. Local; returns at once."""
        self._start(lambda: self._connect(invitation, first))

    def stop(self) -> None:
        """Close the connections; `when_silent` is not called afterwards. May be called twice."""
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1
            if self._thread is not None:
                self._thread.join()
            for peer in self._peers:
                peer.close()
            self._selector.close()
            os.close(self._stopped)

    def _start(self, begin: Callable[[], bool]) -> None:
        def run() -> None:
            if begin():
                while self._watch(None):
                    pass
        self._thread = threading.Thread(target=run, name="mpistrat-hosts", daemon=True)
        self._thread.start()

    def _accept(self, listener: socket.socket, secret: bytes, missing: set[int]) -> bool:
        """Accept the connections of the missing ranks. Returns False after `stop`."""
        self._selector.register(listener, selectors.EVENT_READ)
        until, goes_on = time.monotonic() + _LISTEN_S, True
        strangers: dict[socket.socket, bytes] = {}  # with what they have said
        while missing and goes_on and time.monotonic() < until:
            goes_on = self._watch(until - time.monotonic(), listener, strangers)
            for stranger, hello in list(strangers.items()):
                if len(hello) < _HELLO_BYTES:
                    continue
                del strangers[stranger]
                rank = int.from_bytes(hello[_SECRET_BYTES:], "big")
                if hmac.compare_digest(hello[:_SECRET_BYTES], secret) and rank in missing:
                    missing.remove(rank)
                    self._peers[stranger] = rank
                    self._probe(stranger)
                else:
                    self._forget(stranger)
        for each in (listener, *strangers):
            self._forget(each)
        if missing:
            logger.debug("rank %d: ranks %s have not connected; the end of their hosts will not be noticed", self._rank,
                         sorted(missing))
        return goes_on

    def _connect(self, invitation: Invitation, first: int) -> bool:
        """Connect to the first address that works."""
        for address in invitation.addresses:
            try:
                peer = socket.create_connection((address, invitation.port), _CONNECT_LIMIT_S)
                peer.sendall(invitation.secret + self._rank.to_bytes(4, "big"))
            except OSError as error:
                logger.debug("rank %d: the first rank is not reached at %s: %s", self._rank, address, error)
                continue
            peer.setblocking(False)
            self._peers[peer] = first
            self._selector.register(peer, selectors.EVENT_READ)
            self._probe(peer)
            return True
        return False

    def _probe(self, peer: socket.socket) -> None:
        """Have the kernel probe a connection, and end it when nothing is answered for the limit."""
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            peer.setsockopt(socket.IPPROTO_TCP, option, max(1, round(self._heartbeat_s)))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._limit_s * 1000))

    def _watch(self, timeout_s: float | None, listener: socket.socket | None = None,
               strangers: dict[socket.socket, bytes] | None = None) -> bool:
        """Wait for what happens next, and take it in. Returns False after `stop`."""
        strangers = strangers if strangers is not None else {}
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj == self._stopped:
                return False
            if key.fileobj is listener and listener is not None:
                self._take(listener, strangers)
                continue
            peer: socket.socket = key.fileobj  # type: ignore[assignment]
            try:
                part = peer.recv(_HELLO_BYTES - len(strangers.get(peer, b"")))
            except BlockingIOError:
                continue
            except OSError as error:
                if peer in self._peers and error.errno in _SILENT:
                    self._when_silent(self._peers[peer])
                part = b""
            if part and peer in strangers:
                strangers[peer] += part
            else:
                strangers.pop(peer, None)
                self._peers.pop(peer, None)
                self._forget(peer)
        return True

    def _take(self, listener: socket.socket, strangers: dict[socket.socket, bytes]) -> None:
        try:
            stranger, _ = listener.accept()
        except OSError:
            return  # It has gone already.
        if len(strangers) == _MOST_STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            self._forget(oldest)
        stranger.setblocking(False)
        strangers[stranger] = b""
        self._selector.register(stranger, selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        connection.close()


def local_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this host's interfaces, in the order of the interfaces, without the loopback's."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # The interface is down, or has no IPv4 address.
                reply = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(reply[20:24]))
    return tuple(address for address in found if not address.startswith("127."))
