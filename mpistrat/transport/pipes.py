"""Messages among the ranks of one host over pipes: each rank reads from one, to which the others write.

The pipes have no name; see open_file. A receiver sleeps in the kernel until a message arrives. Used by the engine's
thread, except `PipeChannel.wake`, which any thread may call.
"""

import io
import math
import os
import select
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from ..core.errors import MessageError
from .open_file import OpenFile

_LAST, _MORE, _WAKE = range(3)
_HEADER = struct.Struct("=BIH")  # one of these numbers, the sender, and the bytes that follow
_PART_BYTES = select.PIPE_BUF - _HEADER.size  # The kernel does not mix up what is written by calls of up to PIPE_BUF.
_READ_BYTES = 64 * 1024  # what a pipe holds by default
_SELECT_LIMIT = 1024  # select() takes lower descriptors only, but has timeouts in microseconds; poll() in milliseconds


class PipeChannel:
    """One rank's connection to the ranks of its host. The kernel removes it when the process ends.

    At first the rank reaches only itself; `connect` adds the others. Messages of one sender arrive in order and are not
    lost. If a receiver's pipe is full, they wait in the sender, and a later call sends them.

    Args:
        rank: This rank.

    Raises:
        OSError: The process, or its user, has reached a limit.
    """

    def __init__(self, rank: int):
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._inbox, self._own = io.FileIO(reader, "r"), io.FileIO(writer, "w")
        self._pipes = {rank: self._own}
        self._rank, self._wake_up = rank, _HEADER.pack(_WAKE, rank, 0)
        self._wake_lock = threading.RLock()  # A signal handler may interrupt `wake`, and call it.
        self._poller = select.poll()
        self._poller.register(self._inbox, select.POLLIN)
        self._outbox: dict[int, deque[bytes]] = {}
        self._unread = b""
        self._partial: dict[int, list[bytes]] = {}
        self._is_woken = self._is_waking = False
        self._has_other_news: Callable[[], bool] = bool

    @property
    def inbox(self) -> OpenFile:
        """This rank's pipe, for `connect` of the others."""
        return OpenFile.of(self._own.fileno())

    def connect(self, inboxes: Mapping[int, OpenFile]) -> None:
        """Open the pipes of other ranks. Local. No rank may close its channel until all others have returned.

        Raises:
            OSError: A pipe cannot be opened. Those before it are connected.
        """
        for rank, inbox in inboxes.items():
            self._pipes[rank] = io.FileIO(inbox.open(os.O_WRONLY | os.O_NONBLOCK), "w")

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Make `ready`, and `wait` while it spins, also return when `has_news()` is true."""
        self._has_other_news = has_news

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """Whether a message waits for room in the queue of one of `ranks`."""
        return any(self._outbox.get(rank) for rank in ranks)

    @property
    def is_sending(self) -> bool:
        """Whether a message waits for room in a receiver's queue."""
        return any(self._outbox.values())

    def send(self, rank: int, message: bytes) -> None:
        """Send to a rank of this host. Never blocks."""
        outbox = self._outbox.setdefault(rank, deque())
        for start in range(0, max(len(message), 1), _PART_BYTES):
            part = message[start:start + _PART_BYTES]
            kind = _LAST if start + _PART_BYTES >= len(message) else _MORE
            outbox.append(_HEADER.pack(kind, self._rank, len(part)) + part)
        self._flush_to(rank)

    def flush(self) -> None:
        """Send the messages that wait, as far as there is room."""
        for rank in self._outbox:
            self._flush_to(rank)

    def _flush_to(self, rank: int) -> None:
        outbox, pipe = self._outbox[rank], self._pipes[rank]
        while outbox and _write(pipe, outbox[0]):
            outbox.popleft()

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have arrived, as (sender, message). Does not wait.

        Raises:
            MessageError: Something has arrived that no rank sends.
        """
        messages: list[tuple[int, bytes]] = []
        data, self._unread = self._unread + (self._inbox.read(_READ_BYTES) or b""), b""
        start = 0
        while start + _HEADER.size <= len(data):
            kind, sender, nbytes = _HEADER.unpack_from(data, start)
            if kind > _WAKE or sender not in self._pipes:
                raise MessageError(f"a part of a message came that begins with {data[start:start + _HEADER.size]!r}, "
                                   "as no rank of this host sends it.")
            body, end = start + _HEADER.size, start + _HEADER.size + nbytes
            if end > len(data):
                break
            if kind == _WAKE:
                self._is_woken = False
            elif kind == _MORE:
                self._partial.setdefault(sender, []).append(data[body:end])
            else:
                messages.append((sender, b"".join([*self._partial.pop(sender, ()), data[body:end]])))
            start = end
        self._unread = data[start:]
        return messages

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Wait for at most `timeout_s` until `ready`, spinning for the first `spin_s`. Returns whether it is ready."""
        if spin_s:
            until = time.monotonic() + min(spin_s, timeout_s)
            while time.monotonic() < until:
                if self.ready():
                    return True
                os.sched_yield()
        return self._await(timeout_s)

    def ready(self) -> bool:
        """Whether a message has arrived. Makes a system call, during which other threads may run."""
        return self._await(0.0) or self._has_other_news()

    def _await(self, timeout_s: float) -> bool:
        if self._inbox.fileno() < _SELECT_LIMIT:
            return bool(select.select([self._inbox], [], [], timeout_s)[0])
        return bool(self._poller.poll(math.ceil(timeout_s * 1000)))

    def wake(self) -> None:
        """Make this rank's `wait` return. Any thread may call it."""
        with self._wake_lock:
            if self._is_woken and not self._is_waking:
                return  # One wake-up in the pipe suffices. More would take the room of messages.
            self._is_woken = self._is_waking = True
            try:
                if not _write(self._own, self._wake_up):
                    self._is_woken = False  # The pipe is full, so `wait` returns anyway. A later `wake` must try again.
            finally:
                self._is_waking = False

    def wake_rank(self, rank: int) -> None:
        """Make the `wait` of another rank of this host return."""
        _write(self._pipes[rank], self._wake_up)  # If its pipe is full, it does not sleep.

    def close(self) -> None:
        """Close the pipes. May be called twice."""
        for pipe in (self._inbox, *self._pipes.values()):
            pipe.close()


def _write(pipe: io.FileIO, data: bytes) -> bool:
    """Write all of at most PIPE_BUF bytes, or nothing if the pipe is full. Returns whether it is done with.

    What is written to a process that has ended is dropped. The launcher, or its last message, reports that.
    """
    is_ignored = signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN  # As Python has it, unless the script changes it.
    before = None if is_ignored else signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
    try:
        return pipe.write(data) is not None
    except BrokenPipeError:
        return True
    finally:
        if before is not None:
            signal.sigtimedwait({signal.SIGPIPE}, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
