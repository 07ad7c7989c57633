"""Entries of GPU tensors in execution, with the memory that the GPU uses for them."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.handle import Entry, Handle, complete_all
from .arrays import Allocated, GpuArray, GpuEvent, GpuTensors

_COMPLETE = Handle("complete")  # Without results.
_COMPLETE.complete([])
_NOTHING = Allocated((), [], None)


@dataclass(slots=True)
class Work:
    """An entry, its tensors, memory for its results, and what enqueues it; None: it is fused with others."""

    entry: Entry
    tensors: GpuTensors
    made: Allocated
    run: "Callable[[Work], None] | None" = None

    def targets(self, shapes: Sequence[tuple[int, ...]]) -> list[GpuArray]:
        """The results, which have these shapes, as arrays."""
        return list(map(GpuArray, self.made.addresses, shapes, self.tensors.dtypes, self.made.results))


@dataclass(slots=True, eq=False)
class Batch:
    """Entries that were enqueued together at the time `since`, and are over after `ends`."""

    works: list[Work]
    ends: list[GpuEvent]
    since: float
    began: int  # As `since`, as time.monotonic_ns().
    is_complete: bool = False  # Whether the handles are.

    def complete(self) -> None:
        """Complete the handles that are not."""
        if not self.is_complete:
            self.is_complete = True
            complete_all([(work.entry.handle, work.made.results) for work in self.works])

    def release(self) -> None:
        """Drop memory that the GPU may still use, if it belongs to the order of streams that wait for the end."""
        for work in self.works:
            tensors = work.tensors
            if tensors.streams and tensors.streams == tensors.readers:
                work.made, work.entry.handle = _NOTHING, _COMPLETE
                tensors.owner = tensors.made = tensors.allocate = None  # type: ignore[assignment]


def tensors_in(entry: Entry) -> GpuTensors:
    """The tensors of an entry that are on the GPU. An all-to-all has splits beside them."""
    arrays: Any = entry.arrays
    tensors: GpuTensors = arrays if type(arrays) is GpuTensors else arrays[0]
    return tensors


def over(batches: deque[Batch], but: int = 0) -> Iterator[Batch]:
    """Take the batches that the GPU has done from the front, but not the last ones."""
    while len(batches) > but and False not in [end.done for end in batches[0].ends]:
        yield batches.popleft()
