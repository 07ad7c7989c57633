"""Notices that another host does not answer any more: it is down, or the link to it is cut.

The first rank of each host has a line to the first rank of the job. The kernels probe it and answer, whatever the
processes do: one that is stopped, or holds the interpreter's lock, is no silent host. The processes send nothing but
their ranks. The end of a process closes its line, which tells nothing here.
"""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .line import Line, Listening, connect

logger = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 30.0  # for all addresses
_SIOCGIFADDR = 0x8915  # from linux/sockios.h: the IPv4 address of an interface
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


@dataclass(frozen=True)
class Invitation:
    """Where the first rank of the job listens, for the first ranks of the other hosts.

    Attributes:
        addresses: The addresses of its host.
        port: The port.
        secret: Of the job.
    """

    addresses: Sequence[str]
    port: int
    secret: bytes


class SilentHosts:
    """The lines of one rank, until `stop` is called. Each has a thread, which waits for the end of the line.

    Args:
        rank: This rank.
        heartbeat_s: Seconds between two probes, at least 1.
        limit_s: Seconds without an answer after which a host is silent.
        when_silent: Called with the rank at the other end, in that thread.
    """

    def __init__(self, rank: int, heartbeat_s: float, limit_s: float, when_silent: Callable[[int], None]):
        self._rank, self._heartbeat_s, self._limit_s, self._when_silent = rank, heartbeat_s, limit_s, when_silent
        self._lock = threading.Lock()
        self._lines: list[Line] = []
        self._missing: set[int] = set()
        self._listening: Listening | None = None
        self._is_stopped = False

    def listen(self, ranks: Sequence[int], addresses: Sequence[str]) -> Invitation:
        """On the first rank of the job: expect lines of these ranks, the first of the other hosts. Local.

        Raises:
            OSError: There is no free port.
        """
        listener = socket.create_server(("", 0), backlog=1024)
        port, secret = listener.getsockname()[1], os.urandom(32)
        with self._lock:  # `_greet` closes what listens.
            self._missing = set(ranks)
            self._listening = Listening(listener, secret, self._greet)
        return Invitation(addresses, port, secret)

    def connect(self, invitation: Invitation, first: int) -> None:
        """On the first rank of another host: connect to rank `first`. Local; returns at once."""
        def run() -> None:
            addresses = [(address, invitation.port) for address in invitation.addresses]
            try:
                line = connect(addresses, invitation.secret, _CONNECT_LIMIT_S)
            except OSError as error:
                logger.debug("rank %d: the end of the first rank's host will not be noticed, since it is not reached: "
                             "%s", self._rank, error)
                return
            line.send(rank=self._rank)
            self._watch(line, first)
        threading.Thread(target=run, name="mpistrat-hosts", daemon=True).start()

    def stop(self) -> None:
        """Close the lines; a host that is silent from now on is not reported. May be called twice."""
        with self._lock:
            self._is_stopped = True
            if self._listening is not None:
                self._listening.close()
            for line in self._lines:
                line.close()
            self._lines = []

    def _greet(self, line: Line) -> None:
        """Take the line of a missing rank, in a thread of its own."""
        try:
            rank = line.receive()["rank"]
        except OSError:
            return  # It has ended.
        with self._lock:
            self._missing.discard(rank)
            if not self._missing and self._listening is not None:
                self._listening.close()
        self._watch(line, rank)

    def _watch(self, line: Line, rank: int) -> None:
        """Wait for the end of a line."""
        with self._lock:
            if self._is_stopped:
                line.close()
                return
            self._lines.append(line)
        try:
            line.probe(self._heartbeat_s, self._limit_s)
            line.receive()  # Nothing comes.
        except OSError as error:
            if error.errno in _SILENT and not self._is_stopped:
                self._when_silent(rank)


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


def elsewhere(addresses: Iterable[str]) -> list[str]:
    """Those of another host's `addresses` that this host does not have itself.

    An address that both have, usually of a container bridge, leads back to this host.
    """
    own = local_addresses()
    return [address for address in addresses if address not in own]
