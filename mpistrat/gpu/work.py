"""Entries of GPU tensors in execution, with the memory that the GPU uses for them. Used by gpu_executor.py.

All-gathers, reduce-scatters and all-to-alls are executed one by one. The sizes of their results depend on other ranks,
so the ranks exchange their numbers of rows over the host.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ..core.arithmetic import Reduction
from ..core.handle import Entry, Handle, complete_all
from ..core.request import CollectiveType, Request
from ..core.rows import exchanged_elements, received_rows, row_size, rows_of_ranks
from ..core.topology import Topology
from .arrays import Allocated, GpuArray, GpuEvent, GpuTensors
from .backend import GpuBackend
from .communicators import Exchange

_COMPLETE = Handle("complete")  # Without results.
_COMPLETE.complete([])
_NOTHING = Allocated((), [], None)


@dataclass(slots=True)
class Work:
    """An entry, its tensors, memory for its results, and the function that enqueues it (None: fused with others)."""

    entry: Entry
    tensors: GpuTensors
    made: Allocated
    run: "Callable[[Work], None] | None" = None

    def targets(self, shapes: Sequence[tuple[int, ...]]) -> list[GpuArray]:
        """The results, which have these shapes, as arrays."""
        return list(map(GpuArray, self.made.addresses, shapes, self.tensors.dtypes, self.made.results))


@dataclass(slots=True, eq=False)
class Batch:
    """Entries that were enqueued together at the time `since`, and are complete after the events `ends`."""

    works: list[Work]
    ends: list[GpuEvent]
    since: float
    began: int  # As `since`, as time.monotonic_ns().
    is_complete: bool = False  # Whether the handles are complete.

    def complete(self) -> None:
        """Complete the handles, unless they are complete."""
        if not self.is_complete:
            self.is_complete = True
            complete_all([(work.entry.handle, work.made.results) for work in self.works])

    def release(self) -> None:
        """Drop memory that the GPU may still use, if it is reused in the order of streams that wait for the end."""
        for work in self.works:
            tensors = work.tensors
            if tensors.streams and tensors.streams == tensors.readers:
                work.made, work.entry.handle = _NOTHING, _COMPLETE
                tensors.owner = tensors.made = tensors.allocate = None  # type: ignore[assignment]


def tensors_in(entry: Entry) -> GpuTensors:
    """The tensors of an entry that are on the GPU. An all-to-all also has splits on the host."""
    arrays: Any = entry.arrays
    tensors: GpuTensors = arrays if type(arrays) is GpuTensors else arrays[0]
    return tensors


def over(batches: deque[Batch], but: int = 0) -> Iterator[Batch]:
    """Remove and yield the batches at the front that the GPU has finished, except the last `but` batches."""
    while len(batches) > but and False not in [end.done for end in batches[0].ends]:
        yield batches.popleft()


# -- entries that are executed one by one ----------------------------------------------------------------------------

Shape = tuple[int, ...]
Run = Callable[[Work], None]  # Enqueues the work of an entry.


class SingleCollectives:
    """Collectives that are executed one by one: what the ranks exchange before each, and the work that it enqueues.

    Args:
        exchange: An exchange among the ranks of `topology`.
        reduction: Returns the arithmetic for a request.
    """

    backends: Sequence[GpuBackend]  # The first one is used; the last one for collectives that the first cannot do.

    def __init__(self, topology: Topology, exchange: Exchange, reduction: Callable[[Request], Reduction]):
        self._topology, self._exchange, self._reduction = topology, exchange, reduction

    def planned(self, entry: Entry, tensors: GpuTensors) -> tuple[Sequence[Shape], Run | None]:
        """Return the shapes of an entry's results, and the function that enqueues it; None: it is fused with others.

        Collective, over the host.

        Raises:
            InvalidRequestError: On all ranks, if the splits of an all-to-all do not match its rows.
        """
        kind = entry.request.kind
        if kind is CollectiveType.ALLGATHER:
            return self._allgather(tensors)
        if kind is CollectiveType.REDUCESCATTER:
            return self._reducescatter(entry, tensors)
        if kind is CollectiveType.ALLTOALL:
            return self._alltoall(entry, tensors)
        return tensors.shapes, None

    def _allgather(self, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        rows = list(zip(*self._exchange([shape[0] for shape in tensors.shapes]), strict=True))
        shapes = [(sum(counts), *shape[1:]) for shape, counts in zip(tensors.shapes, rows, strict=True)]

        def run(work: Work) -> None:
            for array, result, counts in zip(tensors, work.targets(shapes), rows, strict=True):
                elements = row_size(array.shape)
                self.backends[0].allgather(array, result, [count * elements for count in counts])

        return shapes, run

    def _reducescatter(self, entry: Entry, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        rows = [rows_of_ranks(shape[0], self._topology.size) for shape in tensors.shapes]
        shapes = [(counts[self._topology.rank], *shape[1:]) for shape, counts in zip(tensors.shapes, rows, strict=True)]

        def run(work: Work) -> None:
            reduction = self._reduction(entry.request)
            for array, result, counts in zip(tensors, work.targets(shapes), rows, strict=True):
                elements = row_size(array.shape)
                backend = self.backends[-1 if self.backends[0].why_not_scatter(array, reduction) else 0]
                backend.reducescatter(array, result, [count * elements for count in counts], reduction)

        return shapes, run

    def _alltoall(self, entry: Entry, tensors: GpuTensors) -> tuple[list[Shape], Run]:
        splits, array = cast("np.ndarray", entry.arrays[1]), tensors[0]
        table = np.array(self._exchange([array.shape[0], *splits.tolist()]))
        received = received_rows(entry.request.name, table, self._topology)
        shapes = [(int(received.sum()), *array.shape[1:])]

        def run(work: Work) -> None:
            self.backends[0].alltoall(array, work.targets(shapes)[0],
                                       *exchanged_elements(table, self._topology.rank, row_size(array.shape)))
            work.made.results.append(received.astype(splits.dtype))

        return shapes, run
