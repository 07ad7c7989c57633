"""The messages of the negotiation: Announcement (towards rank 0) and Decision (from rank 0), with their byte form.

The first byte gives the kind. The fields follow in msgpack: numbers, texts and tuples of them, nothing that could run
code. A message that has only numbers of requests, as in every step seen before, has them as 8-byte integers instead.
Reading checks types, lengths and ranges, and raises MessageError for any other message: ranks of another version may
take part, and a message must not make this rank fail later, in another place. The coordinator makes and reads the
messages, the controller sends them. Pure.
"""

import array
from enum import Enum
from typing import NamedTuple, TypeVar

import msgpack

from ..core.errors import MessageError
from ..core.plain_values import COUNTS, RANKS, are_in, is_tuple_of
from ..core.request import Request

_NUMBERS, _ANNOUNCEMENT, _DECISION = b"\1", b"\2", b"\3"
_NUMBERS_HEADER = _NUMBERS + bytes(7)  # The numbers are aligned to 8 bytes.

_Message = TypeVar("_Message", "Announcement", "Decision")


def _numbers_to_bytes(numbers: tuple[int, ...]) -> bytes:
    return _NUMBERS_HEADER + array.array("Q", numbers).tobytes()


def _numbers_from_bytes(data: bytes) -> tuple[int, ...]:
    if not data.startswith(_NUMBERS_HEADER) or len(data) % 8:
        raise ValueError("numbers of requests that are cut off")
    return tuple(memoryview(data)[8:].cast("Q"))


def _fields_to_bytes(kind: bytes, fields: tuple) -> bytes:
    # A text may have parts of a file's name that are not UTF-8, as Python's "surrogateescape" represents them.
    return kind + bytes(msgpack.packb(fields, unicode_errors="surrogatepass"))


def _fields_of(data: bytes, kind: bytes, count: int) -> tuple:
    """The fields of a message of this kind, `count` of them. A message that has only numbers has these as its only one.

    Raises:
        ValueError: `data` is no such message. The values of the fields are not checked.
    """
    if data.startswith(_NUMBERS):
        return (_numbers_from_bytes(data),)
    _require(data.startswith(kind), f"it begins with {data[:1]!r}")
    fields = msgpack.unpackb(memoryview(data)[1:], use_list=False, unicode_errors="surrogatepass", max_map_len=0,
                             max_bin_len=0, max_ext_len=0)
    _require(type(fields) is tuple, "no fields")
    _require(len(fields) == count, f"{len(fields)} fields")
    return fields


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)


def _are_pairs(values: object, first: type, second: tuple[type, ...]) -> bool:
    return is_tuple_of(values, tuple) and all(
        len(pair) == 2 and type(pair[0]) is first and type(pair[1]) in second for pair in values)


def _read(message: type[_Message], data: bytes, sender: int | None) -> _Message:
    try:
        return message.read(data)
    except ValueError as error:
        # Also raised by msgpack, and by an enumeration for a value that it does not have.
        who = "a rank" if sender is None else f"rank {sender}"
        raise MessageError(f"{who} sent {len(data)} bytes that are no {message.__name__}: {error}. Do all ranks run "
                           "the same version of mpistrat?") from error


class Announcement(NamedTuple):
    """What a subtree is ready for. A rank sends it to its parent in the tree.

    Attributes:
        ids: Requests that every rank of the subtree has submitted alike, by the number of an earlier Decision.
        requests: Requests in full, each with the ranks that submitted it; None means the whole subtree.
        ended: Ranks of the subtree that have called shutdown(), each with how many operations it completed.
        failure: Why a rank's engine failed.
        ends_vote: A rank has voted, and other ranks have not: rank 0 must end the vote.
        is_stalled: The engine failed because it had waited too long for other ranks.
        joined: Ranks of the subtree that have called join(), in the order in which they did so.
    """

    ids: tuple[int, ...] = ()
    requests: tuple[tuple[Request, tuple[int, ...] | None], ...] = ()
    ended: tuple[tuple[int, int], ...] = ()
    failure: str | None = None
    ends_vote: bool = False
    is_stalled: bool = False
    joined: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """The byte form."""
        if not any(self[1:]):
            return _numbers_to_bytes(self.ids)
        requests = tuple((request.to_tuple(), ranks) for request, ranks in self.requests)
        return _fields_to_bytes(_ANNOUNCEMENT, (self.ids, requests, *self[2:]))

    @classmethod
    def from_bytes(cls, data: bytes, sender: int | None = None) -> "Announcement":
        """The inverse of to_bytes. Raises MessageError, which names the rank `sender`, if `data` is no Announcement."""
        return _read(cls, data, sender)

    @classmethod
    def read(cls, data: bytes) -> "Announcement":
        """As from_bytes, but raises ValueError."""
        fields = _fields_of(data, _ANNOUNCEMENT, len(cls._fields))
        if len(fields) == 1:
            return cls(*fields)
        ids, requests, ended, failure, ends_vote, is_stalled, joined = fields
        _require(are_in(COUNTS, ids), "invalid numbers of requests")
        _require(is_tuple_of(requests, tuple) and all(len(pair) == 2 for pair in requests), "invalid requests")
        for _, ranks in requests:
            _require(ranks is None or are_in(RANKS, ranks), "invalid ranks of a request")
        _require(is_tuple_of(ended, tuple) and all(
            len(pair) == 2 and are_in(COUNTS, pair) and pair[0] in RANKS for pair in ended), "invalid ended ranks")
        _require(failure is None or type(failure) is str, "a failure that is not a text")
        _require(type(ends_vote) is bool, "ends_vote is not a bool")
        _require(type(is_stalled) is bool, "is_stalled is not a bool")
        _require(are_in(RANKS, joined), "invalid ranks that have joined")
        return cls(ids, tuple((Request.from_tuple(request), ranks) for request, ranks in requests), ended, failure,
                   ends_vote, is_stalled, joined)


class EndReason(str, Enum):
    """Why the engines of all ranks end."""

    SHUTDOWN = "shutdown"
    RANK_ENDED = "rank ended"
    STALL = "stall"
    DEADLOCK = "deadlock"
    MISMATCH = "mismatch in a graph"
    FAILURE = "failure"


class Decision(NamedTuple):
    """What all ranks execute next, in this order. Rank 0 sends it down the tree.

    Attributes:
        agreed: Each item is the number of a request, or (number or None, request) for a request without one. From now
            on, all ranks may send a number that is given here.
        errors: (name, text) of requests on which the ranks disagree.
        ended: Some rank has called shutdown(). From now on, ranks pass on incomplete requests at once.
        end: The engines end after this decision, for this reason.
        end_text: The reason as a sentence for the user.
        opens_vote: After this decision all ranks vote; see fast_path.py.
        absent: For each item of `agreed`, the ranks that have joined and take part without a tensor; (): none in all.
        last_joined: The rank that was the last to join, if all ranks have joined now.
    """

    agreed: tuple[int | tuple[int | None, Request], ...] = ()
    errors: tuple[tuple[str, str], ...] = ()
    ended: bool = False
    end: EndReason | None = None
    end_text: str = ""
    opens_vote: bool = False
    absent: tuple[tuple[int, ...], ...] = ()
    last_joined: tuple[int, ...] = ()

    def to_bytes(self) -> bytes:
        """The byte form."""
        if not any(self[1:]) and all(type(a) is int for a in self.agreed):
            return _numbers_to_bytes(self.agreed)  # type: ignore[arg-type]
        agreed = tuple(a if isinstance(a, int) else (a[0], a[1].to_tuple()) for a in self.agreed)
        return _fields_to_bytes(_DECISION, (agreed, self.errors, self.ended, self.end and self.end.value, self.end_text,
                                            self.opens_vote, self.absent, self.last_joined))

    @classmethod
    def from_bytes(cls, data: bytes, sender: int | None = None) -> "Decision":
        """The inverse of to_bytes. Raises MessageError, which names the rank `sender`, if `data` is no Decision."""
        return _read(cls, data, sender)

    @classmethod
    def read(cls, data: bytes) -> "Decision":
        """As from_bytes, but raises ValueError."""
        fields = _fields_of(data, _DECISION, len(cls._fields))
        if len(fields) == 1:
            return cls(*fields)
        agreed, errors, ended, end, end_text, opens_vote, absent, last_joined = fields
        _require(type(agreed) is tuple, "agreed requests that are not a tuple")
        _require(_are_pairs(errors, str, (str,)), "errors that are not texts")
        _require(type(ended) is bool and type(opens_vote) is bool, "ended or opens_vote is not a bool")
        _require(type(end_text) is str, "a reason that is not a text")
        _require(is_tuple_of(absent, tuple) and all(are_in(RANKS, ranks) for ranks in absent)
                 and len(absent) in (0, len(agreed)), "invalid absent ranks")
        _require(are_in(RANKS, last_joined) and len(last_joined) <= 1, "an invalid last rank")
        return cls(tuple(_agreed(item) for item in agreed), errors, ended, None if end is None else EndReason(end),
                   end_text, opens_vote, absent, last_joined)


def _agreed(item: object) -> int | tuple[int | None, Request]:
    if type(item) is int:
        _require(item in COUNTS, "an invalid number of a request")
        return item
    if type(item) is not tuple or len(item) != 2:
        raise ValueError("an agreed item that is not a request")
    number, request = item
    _require(number is None or (type(number) is int and number in COUNTS), "an invalid number of a request")
    return number, Request.from_tuple(request)
