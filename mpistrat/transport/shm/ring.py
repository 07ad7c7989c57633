"""Messages among the ranks of one host through ring buffers in shared memory. Only waking a rank needs a system call.

Used by the engine's thread, except `ShmRing.wake`, which any thread may call.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence

from ...core.tuning import SHM_RING_BYTES, SHM_RING_LOOKS
from ..unix_socket import UnixSocketChannel
from .segment import ASLEEP, HostMemory

_HEADER_BYTES = 256  # two counters, each with two cache lines of its own
_READ = 16  # the index, in words, of the counter of bytes read; the counter of bytes written has index 0
_RING_AND_HEADER_BYTES = _HEADER_BYTES + SHM_RING_BYTES
_LENGTH_BYTES = 4


class _Ring:
    """A ring buffer from one rank to another. The sender calls write and publish, the receiver the other methods."""

    def __init__(self, memory: memoryview):
        self._words = memory[:_HEADER_BYTES].cast("Q")
        self._ring = memory[_HEADER_BYTES:_RING_AND_HEADER_BYTES]
        self._position = 0  # bytes that this end has written or read

    def write(self, data: memoryview) -> int:
        """Write as much of `data` as fits. Returns the number of bytes, which the receiver sees after `publish`."""
        count = min(len(data), SHM_RING_BYTES - (self._position - self._words[_READ]))
        offset = self._position % SHM_RING_BYTES
        first = min(count, SHM_RING_BYTES - offset)
        self._ring[offset:offset + first] = data[:first]
        self._ring[:count - first] = data[first:count]
        self._position += count
        return count

    def publish(self) -> None:
        """Make the written bytes visible to the receiver. To be called after a fence."""
        self._words[0] = self._position

    def unread(self) -> int:
        return self._words[0] - self._position

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, at most as many as `unread` says. To be called after `unread` and a fence."""
        offset = self._position % SHM_RING_BYTES
        first = min(count, SHM_RING_BYTES - offset)
        data = bytes(self._ring[offset:offset + first])
        if first < count:
            data += bytes(self._ring[:count - first])
        self._position += count
        return data

    def release(self) -> None:
        """Let the sender overwrite the bytes that were read. To be called after a fence."""
        self._words[_READ] = self._position


class ShmRing:
    """One rank's channel over ring buffers in shared memory, with the methods of a UnixSocketChannel.

    `memory`: The HostMemory with the rings, which begin at byte `start` of its data and take `ring_bytes(edges)` bytes.
    `edges`: The pairs of ranks of this host that exchange messages, the same on all ranks of the host. `channel`: Used
    only to sleep, and to wake ranks that sleep. `close` closes `channel`. Sleeping ranks set the counter ASLEEP.
    """

    def __init__(self, memory: HostMemory, start: int, edges: Sequence[tuple[int, int]], channel: UnixSocketChannel):
        self._memory, self._channel = memory, channel
        self._rank = memory.ranks[memory.index]
        self._out: dict[int, _Ring] = {}
        self._in: dict[int, _Ring] = {}
        for place, (sender, receiver) in enumerate(way for a, b in edges for way in ((a, b), (b, a))):
            ring = memory.data[start + place * _RING_AND_HEADER_BYTES:]
            if sender == self._rank:
                self._out[receiver] = _Ring(ring)
            elif receiver == self._rank:
                self._in[sender] = _Ring(ring)
        self._unsent: dict[int, bytes] = {}
        self._partial: dict[int, bytes] = {}
        self._is_woken = False
        self._has_other_news: Callable[[], bool] = bool

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def is_sending_to(self, ranks: Iterable[int]) -> bool:
        return bool(self._unsent) and any(rank in self._unsent for rank in ranks)

    def send(self, rank: int, message: bytes) -> None:
        self._push(rank, self._unsent.pop(rank, b"") + len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def flush(self) -> None:
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
            # A receiver posts ASLEEP, then checks its rings, then sleeps: it sees the data, or this rank sees ASLEEP.
            self._memory.fence()
            self.wake_rank(rank)

    def wake_rank(self, rank: int) -> None:
        """Wake another rank of this host, if that rank sleeps. To be called after a fence."""
        if self._memory.counter_of(rank, ASLEEP):
            self._channel.wake_rank(rank)

    def watch(self, has_news: Callable[[], bool]) -> None:
        """See UnixSocketChannel. The rank that causes the news must call `wake_rank`."""
        self._has_other_news = has_news

    def receive(self) -> list[tuple[int, bytes]]:
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
        if spin_s:
            spin_s = min(spin_s, timeout_s)
            deadline = time.monotonic() + spin_s
            while True:
                for _ in range(SHM_RING_LOOKS):
                    if self.ready():
                        return True
                if time.monotonic() >= deadline:
                    break
                self._channel.ready()
                os.sched_yield()
        self._memory.post(1, ASLEEP)
        self._memory.fence()
        try:
            if self.ready():
                return True
            is_woken = self._channel.wait(timeout_s - spin_s)
        finally:
            self._memory.post(0, ASLEEP)
        if is_woken:
            self._channel.receive()  # removes the wake-up
        return is_woken or self.ready()

    def ready(self) -> bool:
        """Return whether there is a message, news (see `watch`) or a `wake` call (true only once). No system call."""
        if self._is_woken:
            self._is_woken = False
            return True
        if self._has_other_news():
            return True
        for channel in self._in.values():  # noqa: SIM110 - any() of a generator takes ten times as long
            if channel.unread():
                return True
        return False

    def wake(self) -> None:
        self._is_woken = True
        if self._memory.counter_of(self._rank, ASLEEP):
            self._channel.wake()

    def close(self) -> None:
        self._channel.close()
        self._has_other_news = bool  # It refers to this object.


LocalChannel = ShmRing | UnixSocketChannel  # how the ranks of one host exchange messages


def ring_bytes(edges: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of shared memory for the rings between the pairs of ranks in `edges`."""
    return 2 * len(edges) * _RING_AND_HEADER_BYTES
