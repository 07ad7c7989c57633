"""The messages of the negotiation: Announcement (towards rank 0) and Decision (from rank 0), with their byte form.

The first byte of a message gives its kind. The fields follow in msgpack, as numbers, texts and tuples, which cannot run
code. In a repeated step, a message has only numbers of requests, as 8-byte integers instead of msgpack. A message that
begins with OBSERVER belongs to the tracing of the engines (trace/), not to the negotiation. Reading checks the form and
not each value, because init() has compared the versions of the ranks. Malformed bytes raise MessageError. The
coordinator makes the messages, and the controller sends them. Pure.
"""

import array
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import msgpack

from ..core.errors import MessageError
from ..core.request import Request

_NUMBERS, _ANNOUNCEMENT, _DECISION, OBSERVER = b"\1", b"\2", b"\3", b"\4"
_NUMBERS_HEADER = _NUMBERS + bytes(7)  # The numbers are aligned to 8 bytes.

_Message = TypeVar("_Message", "Announcement", "Decision")


def _numbers_to_bytes(numbers: tuple[int, ...]) -> bytes:
    return _NUMBERS_HEADER + array.array("Q", numbers).tobytes()


def _fields_to_bytes(kind: bytes, fields: tuple) -> bytes:
    # A text may have parts of a file's name that are not UTF-8, as Python's "surrogateescape" represents them.
    return kind + bytes(msgpack.packb(fields, unicode_errors="surrogatepass"))


def _read(message: type[_Message], make: Callable[..., Any], kind: bytes, data: bytes, sender: int | None) -> _Message:
    """Return the message of class `message` that `data` encodes. `make` constructs it from the decoded fields."""
    try:
        if data.startswith(_NUMBERS_HEADER):
            return message(tuple(memoryview(data)[8:].cast("Q")))
        if not data.startswith(kind):
            raise ValueError(f"the first byte must be {kind!r}. Received: {data[:1]!r}")
        fields = msgpack.unpackb(memoryview(data)[1:], use_list=False, unicode_errors="surrogatepass", max_map_len=0,
                                 max_bin_len=0, max_ext_len=0)
        if type(fields) is not tuple or len(fields) != len(message._fields):
            raise ValueError(f"the message must have {len(message._fields)} fields")
        return make(*fields)
    except (TypeError, ValueError) as error:  # From msgpack and from enumerations too.
        who = "a rank" if sender is None else f"rank {sender}"
        raise MessageError(f"{who} sent {len(data)} bytes that are no {message.__name__}: {error}.") from error


class Announcement(NamedTuple):
    """A rank's message to its parent in the tree: requests for which ranks of its subtree are ready, and other news."""

    # Requests that every rank of the subtree has submitted alike, by the number of an earlier Decision.
    ids: tuple[int, ...] = ()
    # Requests in full, each with the ranks that submitted it; None means the whole subtree.
    requests: tuple[tuple[Request, tuple[int, ...] | None], ...] = ()
    # Ranks of the subtree that have called shutdown(), each with how many operations it completed.
    ended: tuple[tuple[int, int], ...] = ()
    failure: str | None = None  # Why a rank's engine failed.
    ends_vote: bool = False  # A rank has voted, and other ranks have not: rank 0 must end the vote.
    is_stalled: bool = False  # The engine failed because it had waited too long for other ranks.
    joined: tuple[int, ...] = ()  # Ranks of the subtree that have called join(), in the order in which they did so.
    # Ranks of the subtree that were asked where they are, each with its answer.
    places: tuple[tuple[int, str], ...] = ()

    def to_bytes(self) -> bytes:
        if not any(self[1:]):
            return _numbers_to_bytes(self.ids)
        requests = tuple((request.to_tuple(), ranks) for request, ranks in self.requests)
        return _fields_to_bytes(_ANNOUNCEMENT, (self.ids, requests, *self[2:]))

    @classmethod
    def from_bytes(cls, data: bytes, sender: int | None = None) -> "Announcement":
        """The inverse of to_bytes. Raises MessageError, which names the rank `sender`, if `data` is no Announcement."""
        def make(ids: tuple, requests: tuple, *others: Any) -> Announcement:
            return cls(ids, tuple((Request.from_tuple(request), ranks) for request, ranks in requests), *others)

        return _read(cls, make, _ANNOUNCEMENT, data, sender)


class EndReason(str, Enum):
    """Why the engines of all ranks end."""

    SHUTDOWN = "shutdown"
    RANK_LEFT = "rank left"
    STALL = "stall"
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch in a graph"
    FAILURE = "failure"


class Decision(NamedTuple):
    """Rank 0's message to all ranks, down the tree: the requests to execute next, in order, and other news."""

    # Each item is the number of a request, or (number or None, request) for a request without one. From now on, all
    # ranks may send a number that is given here.
    agreed: tuple[int | tuple[int | None, Request], ...] = ()
    errors: tuple[tuple[str, str], ...] = ()  # (name, text) of requests on which the ranks disagree.
    ended: bool = False  # Some rank has called shutdown(). From now on, ranks pass on incomplete requests at once.
    end: EndReason | None = None  # The engines end after this decision, for this reason.
    end_text: str = ""  # The reason as a sentence for the user.
    opens_vote: bool = False  # After this decision all ranks vote; see fast_path.py.
    # For each item of `agreed`, the ranks that have joined and take part without a tensor; (): none in all.
    absent: tuple[tuple[int, ...], ...] = ()
    last_joined: tuple[int, ...] = ()  # The rank that was the last to join, if all ranks have joined now.
    asks: tuple[int, ...] = ()  # Ranks that are to answer where they are, because a report on them is due.

    @property
    def is_news(self) -> bool:
        """Whether the decision has anything besides questions to ranks (`asks`)."""
        return any(self[:-1])

    def to_bytes(self) -> bytes:
        if not any(self[1:]) and all(type(a) is int for a in self.agreed):
            return _numbers_to_bytes(self.agreed)  # type: ignore[arg-type]
        agreed = tuple(a if isinstance(a, int) else (a[0], a[1].to_tuple()) for a in self.agreed)
        return _fields_to_bytes(_DECISION, (agreed, self.errors, self.ended, self.end and self.end.value, self.end_text,
                                            self.opens_vote, self.absent, self.last_joined, self.asks))

    @classmethod
    def from_bytes(cls, data: bytes, sender: int | None = None) -> "Decision":
        """The inverse of to_bytes. Raises MessageError, which names the rank `sender`, if `data` is no Decision."""
        def make(agreed: tuple, errors: tuple, ended: bool, end: str | None, *others: Any) -> Decision:
            items = tuple(item if isinstance(item, int) else (item[0], Request.from_tuple(item[1])) for item in agreed)
            return cls(items, errors, ended, None if end is None else EndReason(end), *others)

        return _read(cls, make, _DECISION, data, sender)
