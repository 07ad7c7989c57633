"""What ranks tell each other: Request, Announcement (towards rank 0) and Decision (from rank 0), with their byte form.

The byte form is a pickle of plain tuples, or bare numbers where there is nothing else, as in every step seen before. It
is exchanged only among the processes of one MPI job, which run the same user's code.
"""

import array
import hashlib
import pickle
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from typing import Any, NamedTuple

DEVICE_CPU, DEVICE_GPU = "cpu", "gpu"

_NUMBERS = b"\1"  # No pickle begins like this.
_PADDING = bytes(7)  # so that the numbers are where a processor reads them at once


def _numbers_to_bytes(numbers: tuple[int, ...]) -> bytes:
    return _NUMBERS + _PADDING + array.array("Q", numbers).tobytes()


def _numbers_from_bytes(data: bytes) -> tuple[int, ...]:
    return tuple(memoryview(data)[8:].cast("Q"))


class ReduceOp(IntEnum):
    """How an all-reduce combines values. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Kind(str, Enum):
    """Which collective a request asks for."""

    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"


class TensorSpec(NamedTuple):
    """What ranks must agree on about one tensor: the dtype's numpy name and the shape.

    For an allgather the first dimension, which may differ among ranks, is -1.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A rank says: these tensors are ready to be reduced, gathered or broadcast, together.

    Ranks match requests by `name`; everything else must be equal on all of them, but for `labels` and `in_graph`.

    Attributes:
        tensors: What the ranks agree on.
        device: Where the tensors are: DEVICE_CPU or DEVICE_GPU.
        layout: Which of the caller's tensors each array that travels is made of, when small ones are joined or the
            order is another; () for one array per tensor, in order.
        wire: The dtype that wider floating-point tensors on a GPU may travel in; "" for their own.
        labels: What users call the tensors (a variable's path), for error messages; may be empty.
        in_graph: The collective stands in a graph: an error ends the execution of the whole graph.
    """

    kind: Kind
    name: str
    tensors: tuple[TensorSpec, ...] = ()
    reduce_op: ReduceOp = ReduceOp.SUM
    root_rank: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = DEVICE_CPU
    layout: tuple[tuple[int, ...], ...] = ()
    wire: str = ""
    labels: tuple[str, ...] = field(default=(), compare=False)
    in_graph: bool = field(default=False, compare=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.name, self.tensors, self.reduce_op, self.root_rank, self.prescale, self.postscale,
                     self.device, self.layout, self.wire))

    def __hash__(self) -> int:
        # A request of hundreds of tensors is looked up in tables several times per step.
        return self._hash

    @cached_property
    def fingerprint(self) -> int:
        """61 bits, never 0, that are the same for equal requests on all ranks, and for no others."""
        compared = repr(self.to_tuple()[:-2])  # without labels and in_graph
        return int.from_bytes(hashlib.blake2b(compared.encode(), digest_size=8).digest(), "little") >> 3 or 1

    def to_tuple(self) -> tuple:
        """The fields as plain values."""
        return (self.kind.value, self.name, tuple((t.dtype, t.shape) for t in self.tensors), int(self.reduce_op),
                self.root_rank, self.prescale, self.postscale, self.device, self.layout, self.wire, self.labels,
                self.in_graph)

    @classmethod
    def from_tuple(cls, values: tuple) -> "Request":
        """The inverse of to_tuple."""
        kind, name, tensors, reduce_op, *rest = values
        return cls(Kind(kind), name, tuple(TensorSpec(*t) for t in tensors), ReduceOp(reduce_op), *rest)


class Announcement(NamedTuple):
    """A rank tells its parent in the tree what its subtree is ready for.

    Attributes:
        ids: Requests that every rank of the subtree has submitted alike, by the number of an earlier Decision.
        requests: Requests in full, each with the ranks that submitted it; None means the whole subtree.
        ended: Ranks of the subtree that have called shutdown(), each with how many operations it completed.
        failure: Why a rank's engine failed, for all others to hear.
        recall: A rank has voted, and others do nothing: rank 0 shall end the vote.
        is_stalled: `failure` is that it waited too long for other ranks.
    """

    ids: tuple[int, ...] = ()
    requests: tuple[tuple[Request, tuple[int, ...] | None], ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    failure: str | None = None
    recall: bool = False
    is_stalled: bool = False

    def to_bytes(self) -> bytes:
        """The byte form."""
        if not any(self[1:]):
            return _numbers_to_bytes(self.ids)
        requests = tuple((request.to_tuple(), ranks) for request, ranks in self.requests)
        return pickle.dumps((self.ids, requests, self.ended, self.failure, self.recall, self.is_stalled), protocol=5)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Announcement":
        """The inverse of to_bytes."""
        if data[:1] == _NUMBERS:
            return cls(_numbers_from_bytes(data))
        ids, requests, *rest = pickle.loads(data)
        return cls(ids, tuple((Request.from_tuple(r), ranks) for r, ranks in requests), *rest)


class End(str, Enum):
    """Why the engines of all ranks end."""

    SHUTDOWN = "shutdown"
    RANK_ENDED = "rank ended"
    STALL = "stall"
    MISMATCH = "mismatch in a graph"
    FAILURE = "failure"


class Decision(NamedTuple):
    """Rank 0 tells all ranks what to execute next, in this order.

    Attributes:
        agreed: Each a number of an earlier Decision, or (number or None, request) when it is described for the first
            time; a number given here may be used by all ranks from now on.
        errors: (name, text) of requests about which the ranks disagree.
        ended: Some rank has called shutdown(); from now on what is incomplete is passed on at once.
        end: The engines end after this decision, for this reason.
        end_text: What to tell the user about it.
        choice: (knob, value) of how to reduce from now on, this decision included; see autotune.
        calls_vote: After this decision all ranks vote; see voting.
    """

    agreed: tuple[int | tuple[int | None, Request], ...] = ()
    errors: tuple[tuple[str, str], ...] = ()
    ended: bool = False
    end: End | None = None
    end_text: str = ""
    choice: tuple[tuple[str, Any], ...] = ()
    calls_vote: bool = False

    def to_bytes(self) -> bytes:
        """The byte form."""
        if not any(self[1:]) and all(type(a) is int for a in self.agreed):
            return _numbers_to_bytes(self.agreed)  # type: ignore[arg-type]
        agreed = tuple(a if isinstance(a, int) else (a[0], a[1].to_tuple()) for a in self.agreed)
        return pickle.dumps((agreed, self.errors, self.ended, self.end and self.end.value, self.end_text, self.choice,
                             self.calls_vote), protocol=5)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Decision":
        """The inverse of to_bytes."""
        if data[:1] == _NUMBERS:
            return cls(_numbers_from_bytes(data))
        agreed, errors, ended, end, *rest = pickle.loads(data)
        return cls(tuple(a if isinstance(a, int) else (a[0], Request.from_tuple(a[1])) for a in agreed), errors, ended,
                   End(end) if end else None, *rest)
