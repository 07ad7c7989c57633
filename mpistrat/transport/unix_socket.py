"""Messages among the ranks of one host over Unix datagram sockets. A waiting receiver sleeps in the kernel.

Used by the engine's thread, except `UnixSocketChannel.wake`, which any thread may call.
"""

import errno
import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import MessageError
from ..core.tuning import SOCKET_FRAGMENT_BYTES

_LAST, _MORE, _WAKE = b"\0", b"\1", b"\2"
_HEADER_BYTES = 5  # one of these bytes, and the sender
_SELECT_LIMIT = 1024  # select() takes lower descriptors only, but has timeouts in microseconds; poll() in milliseconds
# Errors of a send to a rank that has ended. The launcher, or the last message of that rank, reports the end.
_GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE)


@dataclass(frozen=True)
class ChannelSockets:
    """The sockets of one rank."""

    inbox: socket.socket  # Receives the messages to this rank. No other rank has this socket.
    # For each rank of the host, including this one, the socket that writes to its inbox. All ranks share the outboxes.
    outboxes: Mapping[int, socket.socket]

    @staticmethod
    def make(ranks: Sequence[int]) -> "dict[int, ChannelSockets]":
        """Make the sockets of all `ranks` of a host. Raises OSError: The process has reached its limit of descriptors.

        A rank's inbox and the outbox to it are a nameless socket pair. Only processes with the outbox can write to it.
        """
        outboxes: dict[int, socket.socket] = {}
        inboxes: dict[int, socket.socket] = {}
        try:
            for rank in ranks:
                outboxes[rank], inboxes[rank] = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                outboxes[rank].setblocking(False)
                inboxes[rank].setblocking(False)
        except OSError:
            for made in (*outboxes.values(), *inboxes.values()):
                made.close()
            raise
        return {rank: ChannelSockets(inboxes[rank], outboxes) for rank in ranks}

    @staticmethod
    def over(descriptors: Sequence[int], ranks: Sequence[int]) -> "ChannelSockets":
        """Wrap received descriptors: the inbox, and the outboxes in the order of `ranks`.

        Raises OSError: A descriptor is not a Unix datagram socket. In this case all descriptors stay open.
        """
        made: list[socket.socket] = []
        try:
            for descriptor in descriptors:
                made.append(socket.socket(fileno=descriptor))
                if (made[-1].family, made[-1].type) != (socket.AF_UNIX, socket.SOCK_DGRAM):
                    raise OSError(f"{made[-1]} is not a Unix datagram socket")
                made[-1].setblocking(False)
        except OSError:
            for taken in made:
                taken.detach()
            raise
        return ChannelSockets(made[0], dict(zip(ranks, made[1:], strict=True)))

    def close(self) -> None:
        """Close all sockets. May be called twice."""
        self.inbox.close()
        for outbox in self.outboxes.values():
            outbox.close()


class UnixSocketChannel:
    """One rank's connection to the ranks of its host. The kernel closes the connection when the process ends.

    Messages of one sender arrive in order and are not lost. If a receiver's queue is full, messages wait in the sender,
    until a later call of `send` or `flush` sends them.
    """

    def __init__(self, rank: int, sockets: ChannelSockets):
        self._rank, self._sockets = rank, sockets
        self._socket, self._outboxes = sockets.inbox, sockets.outboxes
        sender = rank.to_bytes(_HEADER_BYTES - 1, "little")
        self._last, self._more = _LAST + sender, _MORE + sender
        self._wake_lock = threading.RLock()  # A signal handler may interrupt `wake`, and call it.
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._outbox: dict[int, deque[bytes]] = {}
        self._partial: dict[int, list[bytes]] = {}
        self._is_woken = self._is_waking = False
        self._has_other_news: Callable[[], bool] = bool

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Let `ready()` also return true when `has_news()` is true, and `wait()` too while it polls."""
        self._has_other_news = has_news

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """Return whether a message to one of `ranks` waits for room in the queue of its receiver."""
        return any(self._outbox.get(rank) for rank in ranks)

    @property
    def is_sending(self) -> bool:
        """Whether any message waits for room in the queue of its receiver."""
        return any(self._outbox.values())

    def send(self, rank: int, message: bytes) -> None:
        """Send `message` to a rank of this host. Never blocks."""
        outbox = self._outbox.setdefault(rank, deque())
        for start in range(0, max(len(message), 1), SOCKET_FRAGMENT_BYTES):
            end = start + SOCKET_FRAGMENT_BYTES
            outbox.append((self._last if end >= len(message) else self._more) + message[start:end])
        self._flush_to(rank)

    def flush(self) -> None:
        """Send the messages that wait, as far as the queues of the receivers have room. Never blocks."""
        for rank in self._outbox:
            self._flush_to(rank)

    def _flush_to(self, rank: int) -> None:
        outbox = self._outbox[rank]
        while outbox and self._put(rank, outbox[0]):
            outbox.popleft()

    def _put(self, rank: int, datagram: bytes) -> bool:
        """Put a datagram in the queue of a rank, unless that rank has ended. Returns False if the queue is full."""
        try:
            self._outboxes[rank].send(datagram)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _GONE:
                raise
        return True

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, as (sender, message). Does not wait.

        Raises MessageError: A malformed datagram has arrived.
        """
        messages: list[tuple[int, bytes]] = []
        while True:
            try:
                datagram = self._socket.recv(_HEADER_BYTES + SOCKET_FRAGMENT_BYTES)
            except BlockingIOError:
                return messages
            if datagram == _WAKE:
                self._is_woken = False
                continue
            kind, sender = datagram[:1], int.from_bytes(datagram[1:_HEADER_BYTES], "little")
            if len(datagram) < _HEADER_BYTES or kind not in (_LAST, _MORE) or sender not in self._outboxes:
                raise MessageError("this rank received a datagram that is not from a rank of this host. Its header: "
                                   f"{datagram[:_HEADER_BYTES]!r}.")
            parts = self._partial.setdefault(sender, [])
            parts.append(datagram[_HEADER_BYTES:])
            if kind == _LAST:
                messages.append((sender, b"".join(self._partial.pop(sender))))

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Wait until `ready()`, for `timeout_s` at most: spin for `spin_s`, then sleep. Returns false on timeout."""
        if spin_s:
            spin_s = min(spin_s, timeout_s)
            until = time.monotonic() + spin_s
            while time.monotonic() < until:
                if self.ready():
                    return True
                os.sched_yield()
        return self._await(timeout_s - spin_s)

    def ready(self) -> bool:
        """Return whether there is a message or news (see `watch`), by a system call, which lets other threads run."""
        return self._await(0.0) or self._has_other_news()

    def _await(self, timeout_s: float) -> bool:
        if self._socket.fileno() < _SELECT_LIMIT:
            return bool(select.select([self._socket], [], [], timeout_s)[0])
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def wake(self) -> None:
        """Make this rank's `wait` return. Any thread may call `wake`."""
        with self._wake_lock:
            if self._is_woken and not self._is_waking:
                return  # One wake-up in the queue suffices. More would take the room of messages.
            self._is_woken = self._is_waking = True
            try:
                self._outboxes[self._rank].send(_WAKE)
            except BlockingIOError:
                self._is_woken = False  # The queue is full, so `wait` returns anyway. A later `wake` must try again.
            finally:
                self._is_waking = False

    def wake_rank(self, rank: int) -> None:
        """Make the `wait` of another rank of this host return."""
        self._put(rank, _WAKE)  # A rank whose queue is full does not sleep.

    def close(self) -> None:
        self._sockets.close()
