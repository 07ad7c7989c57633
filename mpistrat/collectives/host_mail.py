"""Messages among the ranks of one host over datagram sockets, so that a rank sleeps in the kernel until one comes."""

import math
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

_FRAGMENT_BYTES = 32 * 1024  # Well below the kernel's default for one datagram.
_LAST, _MORE, _WAKE = b"\0", b"\1", b"\2"
_SELECT_LIMIT = 1024  # select() serves only lower descriptors, but to the microsecond; poll() knows milliseconds.


class HostMail:
    """One rank's mailbox, a socket in Linux's abstract namespace; nothing is left behind when its process ends.

    Datagrams of one sender arrive in order and are not lost; when a receiver's queue is full they wait in the sender,
    and go out with a later call.

    Args:
        rank: This rank.
        local_ranks: The ranks on this host.
        token: A text that no other job on this host uses, the same on all ranks.
    """

    def __init__(self, rank: int, local_ranks: Sequence[int], token: str):
        self._addresses = {r: f"\0mpistrat-{token}-{r}" for r in local_ranks}
        self._ranks = {address.encode(): r for r, address in self._addresses.items()}
        self._own = self._addresses[rank]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(self._own)
        # Wake-ups leave from a socket of their own: what a rank has sent and the receivers have yet to read takes room
        # in the sending socket's buffer.
        self._waker = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._waker.setblocking(False)
        self._wake_lock = threading.Lock()
        self._poller = select.poll()
        self._poller.register(self._socket, select.POLLIN)
        self._outbox: dict[int, deque[bytes]] = {}
        self._partial: dict[int, list[bytes]] = {}
        self._is_woken = False
        self._has_other_news: Callable[[], bool] = bool

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Let `has_come`, and a wait while it is awake, also answer to `has_news()`."""
        self._has_other_news = has_news

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """Whether something waits for room in the queue of one of `ranks`."""
        return any(self._outbox.get(rank) for rank in ranks)

    @property
    def is_sending(self) -> bool:
        """Whether something waits for room in a receiver's queue."""
        return any(self._outbox.values())

    def send(self, rank: int, message: bytes) -> None:
        """Send to a rank of this host. Never blocks."""
        outbox = self._outbox.setdefault(rank, deque())
        for start in range(0, max(len(message), 1), _FRAGMENT_BYTES):
            end = start + _FRAGMENT_BYTES
            outbox.append((_LAST if end >= len(message) else _MORE) + message[start:end])
        self._flush_to(rank)

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        for rank in self._outbox:
            self._flush_to(rank)

    def _flush_to(self, rank: int) -> None:
        outbox = self._outbox[rank]
        while outbox:
            try:
                self._socket.sendto(outbox[0], self._addresses[rank])
            except BlockingIOError:
                return
            except (ConnectionRefusedError, FileNotFoundError):
                pass  # That process has ended; the launcher, or its last message, tells of that.
            outbox.popleft()

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come, as (sender, message). Does not wait."""
        messages: list[tuple[int, bytes]] = []
        while True:
            try:
                datagram, address = self._socket.recvfrom(_FRAGMENT_BYTES + 1)
            except BlockingIOError:
                return messages
            if datagram == _WAKE:
                self._is_woken = False
                continue
            sender = self._ranks[address]
            parts = self._partial.setdefault(sender, [])
            parts.append(datagram[1:])
            if datagram[:1] == _LAST:
                messages.append((sender, b"".join(self._partial.pop(sender))))

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Wait until something has come, for at most `timeout_s`, awake for the first `spin_s`. Returns whether."""
        if spin_s:
            until = time.monotonic() + min(spin_s, timeout_s)
            while time.monotonic() < until:
                if self.has_come():
                    return True
                os.sched_yield()
        return self._await(timeout_s)

    def has_come(self) -> bool:
        """Whether something has come. A system call, so that other threads may run meanwhile."""
        return self._await(0.0) or self._has_other_news()

    def _await(self, timeout_s: float) -> bool:
        if self._socket.fileno() < _SELECT_LIMIT:
            return bool(select.select([self._socket], [], [], timeout_s)[0])
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def wake(self) -> None:
        """Make this rank's own wait return. Any thread may call it."""
        with self._wake_lock:
            if self._is_woken:
                return  # One wake-up in the queue is enough; many would crowd out messages.
            self._is_woken = True
            try:
                self._waker.sendto(_WAKE, self._own)
            except BlockingIOError:
                self._is_woken = False  # The queue is full, so the wait returns anyway; but the next one may not.

    def wake_other(self, rank: int) -> None:
        """Make the wait of another rank of this host return."""
        try:
            self._waker.sendto(_WAKE, self._addresses[rank])
        except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
            pass  # Its queue is full, so it does not sleep; or its process has ended, which the launcher tells of.

    def close(self) -> None:
        """Release the sockets."""
        self._socket.close()
        self._waker.close()
