"""ReduceSpec: how a list of tensors is reduced, from the optimizer or the public operation down to one bucket."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...core.request import ScaledOp
from ..async_op.submission import Observer


@dataclass(frozen=True)
class ReduceSpec:
    """How to reduce a list of tensors; the same on all ranks, but for the observer."""

    name: str  # Identifies the collective on all ranks. Tensors reduced separately get names that begin with it.
    scaled: ScaledOp  # How to reduce.
    labels: Sequence[str] = ()  # Users' names of the tensors, for error messages; may be empty.
    # The index of each tensor in the caller's list, if tensors of that list are left out (gradients that are None).
    indices: Sequence[int] = ()
    process_set: int = 0
    # Whether the submit of the last bucket waits, if the bucket is small. False: only if it is the last collective of
    # the graph.
    may_wait: bool = True
    bucket_bytes: int = 0  # The size of the buckets; 0: the size in core.tuning for a CPU or a GPU.
    wire_dtype: str = ""  # As in Request.
    # In a graph, called with the arrays of the first collective before they are submitted.
    observer: Observer | None = None
    # Whether results may be differentiated: those of public operations and of tapes, not those that an optimizer
    # applies.
    has_gradient: bool = False

    def of(self, members: Sequence[int], name: str = "") -> "ReduceSpec":
        """The spec of some of these tensors. `members`: Their positions among these tensors."""
        return replace(self, name=name or self.name,
                       labels=list(map(self.labels.__getitem__, members)) if self.labels else (),
                       indices=list(map(self.indices.__getitem__, members)) if self.indices else list(members))
