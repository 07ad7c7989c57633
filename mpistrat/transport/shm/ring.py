"""Messages among the ranks of one host through shared memory: no system call, unless the receiver is asleep."""

import os
import time
from collections.abc import Callable, Iterable, Sequence

from ..unix_socket import UnixSocketChannel
from .segment import ASLEEP, HostMemory

_RING_BYTES = 8 * 1024
_HEADER_BYTES = 256  # two counters, each with two cache lines of its own
_READ = 16  # words from the first counter, of bytes written, to the second, of bytes read
CHANNEL_BYTES = _HEADER_BYTES + _RING_BYTES
_LENGTH_BYTES = 4
_LOOKS = 16  # between two system calls that let other threads and processes run


class _Channel:
    """A stream of bytes from one rank to one other, in a ring. Each end uses the methods of its side only."""

    def __init__(self, memory: memoryview):
        self._words = memory[:_HEADER_BYTES].cast("Q")
        self._ring = memory[_HEADER_BYTES:CHANNEL_BYTES]
        self._moved = 0  # bytes that this end has written or read

    def write(self, data: memoryview) -> int:
        """Put as much of `data` into the ring as there is room for; returns how much that is. `publish` shows it."""
        count = min(len(data), _RING_BYTES - (self._moved - self._words[_READ]))
        place = self._moved % _RING_BYTES
        first = min(count, _RING_BYTES - place)
        self._ring[place:place + first] = data[:first]
        self._ring[:count - first] = data[first:count]
        self._moved += count
        return count

    def publish(self) -> None:
        """Let the other end see what has been written. After a fence."""
        self._words[0] = self._moved

    def unread(self) -> int:
        """How many bytes there are to read."""
        return self._words[0] - self._moved

    def read(self, count: int) -> bytes:
        """So many bytes. After the `unread` that gave the number and a fence: later bytes may not be visible yet."""
        place = self._moved % _RING_BYTES
        first = min(count, _RING_BYTES - place)
        data = bytes(self._ring[place:place + first])
        if first < count:
            data += bytes(self._ring[:count - first])
        self._moved += count
        return data

    def release(self) -> None:
        """Let the other end use the room of what has been read. After a fence."""
        self._words[_READ] = self._moved


class ShmRing:
    """One rank's mailbox, with the methods of UnixSocketChannel; that one serves for waking ranks that sleep.

    Args:
        memory: Its counter ASLEEP is used.
        start: Where in the memory's data the channels are; `ring_bytes` of them.
        edges: Pairs of ranks of this host that exchange messages, the same list on all of them.
        mail: The mailbox to sleep at.
    """

    def __init__(self, memory: HostMemory, start: int, edges: Sequence[tuple[int, int]], channel: UnixSocketChannel):
        self._memory, self._channel = memory, channel
        self._rank = memory.ranks[memory.index]
        self._out: dict[int, _Channel] = {}
        self._in: dict[int, _Channel] = {}
        for number, (a, b) in enumerate(edges):
            for sender, receiver, place in ((a, b, 2 * number), (b, a, 2 * number + 1)):
                offset = start + place * CHANNEL_BYTES
                if sender == self._rank:
                    self._out[receiver] = _Channel(memory.data[offset:offset + CHANNEL_BYTES])
                elif receiver == self._rank:
                    self._in[sender] = _Channel(memory.data[offset:offset + CHANNEL_BYTES])
        self._unsent: dict[int, bytes] = {}
        self._partial: dict[int, bytes] = {}
        self._is_called = False
        self._has_other_news: Callable[[], bool] = bool

    @property
    def is_sending(self) -> bool:
        """Whether something waits for room."""
        return bool(self._unsent)

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        """Whether something waits for room in the ring towards one of `ranks`."""
        return bool(self._unsent) and any(rank in self._unsent for rank in ranks)

    def send(self, rank: int, message: bytes) -> None:
        """Send to a rank of this host. Never blocks."""
        self._push(rank, self._unsent.pop(rank, b"") + len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        for rank in list(self._unsent):
            self._push(rank, self._unsent.pop(rank))

    def _push(self, rank: int, data: bytes) -> None:
        channel = self._out[rank]
        written = channel.write(memoryview(data))
        if written < len(data):
            self._unsent[rank] = data[written:]
        if written:
            self._memory.fence()
            channel.publish()
            # The receiver says that it sleeps, and then looks again; so one of the two sees what the other has written.
            self._memory.fence()
            self.wake_rank(rank)

    def wake_rank(self, rank: int) -> None:
        """End the wait of another rank of this host, if it sleeps. After a fence."""
        if self._memory.counter_of(rank, ASLEEP):
            self._channel.wake_rank(rank)

    def watch(self, has_news: Callable[[], bool]) -> None:
        """Let this rank's wait also end when `has_news()`; whoever brings that about calls `wake_rank`."""
        self._has_other_news = has_news

    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have come, as (sender, message). Does not wait."""
        messages: list[tuple[int, bytes]] = []
        for sender, channel in self._in.items():
            count = channel.unread()
            if count:
                self._memory.fence()
                data = self._partial.pop(sender, b"") + channel.read(count)
                self._memory.fence()
                channel.release()
                self._split(sender, data, messages)
        return messages

    def _split(self, sender: int, data: bytes, messages: list[tuple[int, bytes]]) -> None:
        start = 0
        while len(data) - start >= _LENGTH_BYTES:
            body = start + _LENGTH_BYTES
            end = body + int.from_bytes(data[start:body], "little")
            if end > len(data):
                break
            messages.append((sender, data[body:end]))
            start = end
        if start < len(data):
            self._partial[sender] = data[start:]

    def wait(self, timeout_s: float, spin_s: float = 0.0) -> bool:
        """Wait until something has come, for at most `timeout_s`, awake for the first `spin_s`. Returns whether."""
        if spin_s:
            until = time.monotonic() + min(spin_s, timeout_s)
            while True:
                for _ in range(_LOOKS):
                    if self.ready():
                        return True
                if time.monotonic() >= until:
                    break
                self._channel.ready()
                os.sched_yield()
        self._memory.post(1, ASLEEP)
        self._memory.fence()
        try:
            if self.ready():
                return True
            is_called = self._channel.wait(timeout_s)
        finally:
            self._memory.post(0, ASLEEP)
        if is_called:
            self._channel.receive()  # which takes the call away
        return is_called or self.ready()

    def ready(self) -> bool:
        """Whether something has come. No system call."""
        if self._is_called:
            self._is_called = False
            return True
        if self._has_other_news():
            return True
        for channel in self._in.values():  # noqa: SIM110 - any() of a generator takes ten times as long
            if channel.unread():
                return True
        return False

    def wake(self) -> None:
        """Make this rank's own wait return. Any thread may call it."""
        self._is_called = True
        if self._memory.counter_of(self._rank, ASLEEP):
            self._channel.wake()

    def close(self) -> None:
        """Release the sockets."""
        self._channel.close()


def ring_bytes(edges: Sequence[tuple[int, int]]) -> int:
    """How much shared memory the channels between these pairs of ranks need."""
    return 2 * len(edges) * CHANNEL_BYTES
