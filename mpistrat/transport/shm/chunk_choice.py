"""The bytes of a chunk of an all-reduce in shared memory, chosen by the times of the job's own all-reduces. Pure.

Cores that share a cache pass small chunks to each other from cache to cache. Cores without a shared cache (two sockets,
two parts of one processor) fetch a small chunk line by line from the writer's cache, and prefetch a large chunk, which
is in memory. The kernel's information on shared caches is wrong in a virtual machine, and a virtual machine may move.
So the times decide. The first rank of a host chooses, in the engine's thread. The other ranks follow its choices.
"""

import statistics
from collections import deque
from collections.abc import Sequence

from ...core import tuning


class ChunkChoice:
    """The choice for all-reduces of one dtype and of nearly the same size.

    All candidates are tried in turn on a few all-reduces, and the best candidate is kept. After a number of all-reduces
    all candidates are tried again; earlier if the speed has changed. The number doubles when a trial changes nothing.
    The speed alone is not enough: when ranks move to cores with a shared cache, large chunks take as long as before.

    Args:
        candidates: Bytes of a chunk. The first candidate is used until the first choice.
    """

    def __init__(self, candidates: Sequence[int]):
        self._candidates, self.chunk = tuple(candidates), candidates[0]  # `chunk`: The choice.
        self.s_per_byte: dict[int, float] = {}  # Of the last trial, by candidate; empty before the first trial's end.
        self._tried: dict[int, list[float]] = {}
        self._untried: deque[int] = deque()
        self._keeps = tuning.CHUNK_KEPT_LEAST  # all-reduces between two trials
        self._kept = 0  # all-reduces since the last trial
        self._at_first: list[float] = []  # seconds per byte of the first of them
        self._lately: deque[float] = deque(maxlen=tuning.CHUNK_SPEED_TIMES)
        # The first time of each has page faults and the making of its layout in it.
        self._try_all(1 + tuning.CHUNK_TRIES)

    def __str__(self) -> str:
        """The choice, and the measured times on which the choice is based."""
        tried = ", ".join(f"{_size(chunk)} {s_per_byte * 2**20 * 1e6:.0f}" for chunk, s_per_byte in
                          self.s_per_byte.items())
        return f"{_size(self.chunk)} (us per MiB: {tried})" if tried else _size(self.chunk)

    def upcoming(self) -> int:
        """The chunk bytes for the all-reduce after the one that begins now. To be called once per all-reduce."""
        return self._untried.popleft() if self._untried else self.chunk

    def took(self, chunk: int, s_per_byte: float) -> bool:
        """Note the time of an all-reduce with these `chunk` bytes. Returns whether this made a first or another choice.

        `s_per_byte`: The seconds per byte, without the wait for the last rank to begin.
        """
        if self._tried:
            self._tried[chunk].append(s_per_byte)
            return self._choose() if min(map(len, self._tried.values())) >= self._tries else False
        if chunk != self.chunk:
            return False  # It was announced before the trial ended.
        self._kept += 1
        if len(self._at_first) < tuning.CHUNK_SPEED_TIMES:
            self._at_first.append(s_per_byte)
            return False
        self._lately.append(s_per_byte)
        least = self._keeps // tuning.CHUNK_EARLIER
        if self._kept >= self._keeps or (self._kept >= least and self._speed_has_changed()):
            self._try_all(tuning.CHUNK_TRIES)
        return False

    def _speed_has_changed(self) -> bool:
        ratio = statistics.median(self._lately) / statistics.median(self._at_first)
        return max(ratio, 1 / ratio) > tuning.CHUNK_SPEED_FACTOR

    def _try_all(self, tries: int) -> None:
        self._tries, self._tried = tries, {chunk: [] for chunk in self._candidates}
        self._untried.extend(self._candidates * tries)
        self._kept = 0
        self._at_first.clear()
        self._lately.clear()

    def _choose(self) -> bool:
        is_first = not self.s_per_byte
        self.s_per_byte = {chunk: min(times[is_first:]) for chunk, times in self._tried.items()}
        self._tried.clear()
        best = min(self.s_per_byte, key=self.s_per_byte.__getitem__)
        is_other = self.s_per_byte[best] < tuning.CHUNK_GAIN * self.s_per_byte[self.chunk]
        if is_other:
            self.chunk, self._keeps = best, tuning.CHUNK_KEPT_LEAST
        elif not is_first:
            self._keeps = min(2 * self._keeps, tuning.CHUNK_KEPT_MOST)
        return is_other or is_first


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"
