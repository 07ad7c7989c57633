"""Small all-reduces between hosts that travel with the votes, so that one trip over the network does for both."""

from collections.abc import Sequence

import numpy as np

from ...core.arithmetic import IDENTITY, Reduction, combine
from ...core.interfaces import Prepared
from ...core.packing import join, split

# Among more hosts it is quicker to agree first, for not every host sends to every other one then.
MOST_HOSTS = 8
# Up to so many bytes of all ranks of a host together its first rank reduces everything, and exchanges it by itself (two
# hosts of two ranks, alternated with the other way: 256 KB 2.5 ms instead of 3.8, 1 MB 5.1 instead of 5.9; with more
# ranks on a host it was not measured).
_MOST_BYTES = 2 * 1024 * 1024
# Each host sends all it has to each other one, which is as little as can be for two hosts only.
_BYTES_OF_MANY = 32 * 1024


class PiggybackedReduce(Prepared):
    """An all-reduce of which this rank's part travels with the next vote.

    Attributes:
        part: This rank's elements.
        result: Shared memory for what the hosts' sums come to.
    """

    __slots__ = ("part", "result")

    def __init__(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction,
                 part: np.ndarray, result: np.ndarray):
        super().__init__(sources, targets, reduction)
        self.part, self.result = part, result
        self.is_packed = True

    def reduce(self, rows: Sequence[np.ndarray]) -> None:
        """On the first rank of a host: reduce the hosts' sums, for all its ranks to see."""
        combine(rows, self.reduction.op, self.result, self.reduction.scale)

    def take(self) -> None:
        """Have the result in the targets, once all ranks have agreed on it, ready. Local."""
        split(self.result, self.targets)


class Piggyback:
    """What the ranks of a host bring for one vote, and what comes of it if all ranks of all hosts vote for the same.

    The ranks pack into memory that all of them see, but for a single array of the first one, which it reads where it
    is. When all have voted, ready, the first rank of the host reduces their parts (`load`), sends that with its host's
    vote, and reduces what the hosts have sent into the same memory (`unload`), before it tells of the outcome. Then
    each rank takes the result (`PiggybackedReduce.take`).

    That needs no counters, for the votes say it all: a rank packs again when it has heard the outcome, for which its
    part was read; and there is another result when all ranks have voted again, after they took the one before.

    An element is summed as by HierarchicalData, with the same result.

    Args:
        memory: `memory_bytes` of it, shared by the ranks of the host.
        index: This rank's position among them.
        count: How many they are.
        slot_bytes: Bytes that an all-reduce may have, as `largest` gives it.

    Attributes:
        slot_bytes: As above.
    """

    def __init__(self, memory: memoryview, index: int, count: int, slot_bytes: int):
        self._bytes = np.frombuffer(memory[:self.memory_bytes(count, slot_bytes)], np.uint8).reshape(count + 1,
                                                                                                     slot_bytes)
        self._index, self.slot_bytes = index, slot_bytes
        self._views: dict[np.dtype, list[np.ndarray]] = {}
        self._latest: PiggybackedReduce | None = None  # on the first rank

    @staticmethod
    def largest(local_sizes: Sequence[int]) -> int:
        """Bytes that an all-reduce may have, for hosts of so many ranks; 0: nothing travels with votes."""
        hosts = len(local_sizes)
        if hosts > MOST_HOSTS:
            return 0
        return min(_MOST_BYTES // max(local_sizes), _MOST_BYTES if hosts == 2 else _BYTES_OF_MANY // hosts) // 64 * 64

    @staticmethod
    def memory_bytes(count: int, slot_bytes: int) -> int:
        """How much shared memory `count` ranks need."""
        return (count + 1) * slot_bytes

    def pack(self, sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], reduction: Reduction,
             elements: int) -> PiggybackedReduce:
        """Bring this rank's part for the next vote: `elements` in all, `slot_bytes` bytes at most. Local."""
        views = self._views_of(sources[0].dtype)
        if self._index == 0 and len(sources) == 1 and reduction.prescale == 1.0:
            # Nobody else reads it (1 MB, two hosts of two ranks: 6.3 ms instead of 6.8).
            part = sources[0].reshape(-1)
        else:
            part = views[self._index][:elements]
            join(sources, part, reduction.prescale)
        reduce_host = PiggybackedReduce(sources, targets, reduction, part, views[-1][:elements])
        if self._index == 0:
            self._latest = reduce_host
        return reduce_host

    def _views_of(self, dtype: np.dtype) -> list[np.ndarray]:
        """The memory for the part of each rank, and for the result."""
        views = self._views.get(dtype)
        if views is None:
            views = self._views[dtype] = [part.view(dtype) for part in self._bytes]
        return views

    # -- on the first rank of a host, when all its ranks have voted for what is packed --------------------------------

    def reduce_host(self, room: np.ndarray) -> int:
        """Put the host's sum into `room`, of `slot_bytes` bytes. Returns how many it takes."""
        reduce_host = self._latest
        assert reduce_host is not None
        size, dtype, nbytes = reduce_host.result.size, reduce_host.result.dtype, reduce_host.result.nbytes
        parts = [reduce_host.part, *[part[:size] for part in self._views_of(dtype)[1:-1]]]
        combine(parts, reduce_host.reduction.op, room[:nbytes].view(dtype), IDENTITY)
        return nbytes

    def reduce_hosts(self, rows: Sequence[np.ndarray]) -> None:
        """Reduce what all hosts have loaded, in their order; all are agreed on it."""
        reduce_host = self._latest
        assert reduce_host is not None
        reduce_host.reduce([row.view(reduce_host.result.dtype) for row in rows])

    def forget(self) -> None:
        """Refer no longer to what was packed, nor to its targets. The vote is over."""
        self._latest = None
