"""What ranks tell each other, and its byte form."""

import array
import dataclasses
import math
import pickle
import random
import struct

import pytest

from mpistrat.core.errors import MessageError
from mpistrat.core.request import CollectiveType, ReduceOp, Request, ScaledOp, TensorSpec
from mpistrat.negotiation.messages import Announcement, Decision, EndReason

PLAIN = Request(CollectiveType.ALLREDUCE, "a", (TensorSpec("float32", (2, 3)),))
FULL = Request(CollectiveType.BROADCAST, "gradient/17", (TensorSpec("bfloat16", ()), TensorSpec("int64", (0, 4))),
               ScaledOp(ReduceOp.MAX, 0.5, 2.0), 3, "gpu", ((0,), (2, 1)), "float16", 7, ("dense/kernel", "dense/bias"))
BARRIER = Request(CollectiveType.BARRIER, "b")
GATHER = Request(CollectiveType.ALLGATHER, "g", (TensorSpec("bool", (-1, 7)),))
REQUESTS = [PLAIN, FULL, BARRIER, GATHER]


@pytest.mark.parametrize("message", [
    Announcement(), Announcement(ids=(0, 5, 2**40)),
    Announcement(requests=((PLAIN, None), (FULL, (0, 2, 300)), (GATHER, ()))),
    Announcement((1,), ((BARRIER, None),), ended=((4, 12), (5, 0)), failure="Traceback: ä\nline 2"),
    Announcement(failure="a name of a file that is not UTF-8: \udcff"),
    Announcement(ids=(2**63 - 1,), ends_vote=True), Announcement(joined=(7, 2)),
    Announcement(places=((7, "in the main thread:\n  here"),)), Announcement(ids=(3,), requests=((PLAIN, (1, 2)),))])
def test_an_announcement_comes_back_from_its_bytes(message: Announcement) -> None:
    copy = Announcement.from_bytes(message.to_bytes())
    assert copy == message
    assert [request.labels for request, _ in copy.requests] == [request.labels for request, _ in message.requests]


@pytest.mark.parametrize("message", [
    Decision(), Decision(agreed=(0, (7, PLAIN), 3, (None, FULL))),
    Decision(errors=(("a", "the ranks disagree"),), ended=True), Decision((3,), opens_vote=True),
    Decision((3, (None, PLAIN)), absent=((), (0, 5))), Decision(last_joined=(0,)), Decision(asks=(0, 3)),
    *(Decision((1,), (), False, end, "why: ü") for end in EndReason)])
def test_a_decision_comes_back_from_its_bytes(message: Decision) -> None:
    copy = Decision.from_bytes(message.to_bytes())
    assert copy == message
    assert copy.end is message.end


def test_labels_are_not_compared() -> None:
    other = dataclasses.replace(FULL, labels=("model/other",))
    assert other == FULL
    assert hash(other) == hash(FULL)


@pytest.mark.parametrize("factor", [0.1, 1 / 3, 5e-324, -0.0, math.inf, -math.inf, math.nan, 2.0**1023])
def test_a_factor_keeps_all_its_bits(factor: float) -> None:
    request = dataclasses.replace(PLAIN, scaled=ScaledOp(ReduceOp.SUM, factor, -factor))
    (_, copy), = Decision.from_bytes(Decision(agreed=((0, request),)).to_bytes()).agreed  # type: ignore[misc]
    assert struct.pack("dd", *copy.scaled[1:]) == struct.pack("dd", factor, -factor)


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.kind.value)
def test_types_and_a_fingerprint_survive_the_way(request_: Request) -> None:
    (copy, _), = Announcement.from_bytes(Announcement(requests=((request_, None),)).to_bytes()).requests
    assert type(copy.kind) is CollectiveType
    assert type(copy.scaled) is ScaledOp and type(copy.scaled.op) is ReduceOp
    assert copy.fingerprint == request_.fingerprint
    assert copy.in_graph == request_.in_graph


# -- what is no message -----------------------------------------------------------------------------------------------


class Harm:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> tuple:
        return pytest.fail, ("a message has run code",)


def refused(message: type, data: bytes) -> str:
    """What is said of it; it must be the one kind of error that there is for it, and name the sender."""
    with pytest.raises(MessageError, match=r"^rank 7 sent ") as caught:
        message.from_bytes(data, 7)  # type: ignore[attr-defined]
    return str(caught.value)


@pytest.mark.parametrize("message", [Announcement, Decision])
@pytest.mark.parametrize("start", [b"", b"\1" + bytes(7), b"\2", b"\3"])
def test_a_message_runs_no_code(message: type, start: bytes) -> None:
    refused(message, start + pickle.dumps(Harm()))
    refused(message, start + pickle.dumps(Harm(), protocol=0))


def test_what_is_no_message_is_told_with_its_sender() -> None:
    assert refused(Decision, b"\3\xc0") == ("rank 7 sent 2 bytes that are no Decision: the message must have 9 fields.")
    with pytest.raises(MessageError, match=r"^a rank sent 0 bytes that are no Announcement: .*Received: b''\."):
        Announcement.from_bytes(b"")


@pytest.mark.parametrize("message", [Announcement(failure="x"), Decision(ended=True)])
def test_one_kind_of_message_is_not_the_other(message: Announcement | Decision) -> None:
    refused(Decision if isinstance(message, Announcement) else Announcement, message.to_bytes())


@pytest.mark.parametrize("message", [Announcement, Decision])
def test_random_bytes_are_refused_by_the_one_error(message: type) -> None:
    chance = random.Random(16)
    valid = [Announcement((1,), ((FULL, (0, 2)), (GATHER, None)), ((4, 12),), "why", True).to_bytes(),
             Decision((0, (7, PLAIN), (None, FULL)), (("a", "text"),), True, EndReason.STALL, "why", (("b",
                                                                                                       1),)).to_bytes(),
             Decision(tuple(range(9))).to_bytes()]
    taken = 0
    for turn in range(20_000):
        if turn % 2:
            data = chance.choice([b"\1" + bytes(7), b"\2", b"\3", b"\2\x95", b"\3\x96", b""])
            data += chance.randbytes(chance.randrange(60))
        else:
            changed = bytearray(chance.choice(valid))
            for _ in range(chance.randrange(1, 4)):
                changed[chance.randrange(len(changed))] = chance.randrange(256)
            data = bytes(changed[:chance.choice([len(changed), chance.randrange(len(changed) + 1)])])
        try:
            message.from_bytes(data, 7)  # type: ignore[attr-defined]
        except MessageError:
            continue
        taken += 1
    assert 0 < taken < 10_000


@pytest.mark.parametrize("depth", [100, 5_000, 100_000])
def test_what_is_nested_deeply_is_refused(depth: int) -> None:
    refused(Decision, b"\3" + b"\x91" * depth + b"\xc0")


@pytest.mark.parametrize("claimed", [b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
                                     b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\1"])
def test_a_length_that_is_only_claimed_takes_no_memory(claimed: bytes) -> None:
    refused(Decision, b"\3" + claimed)
    refused(Announcement, b"\2\x95" + claimed)


def test_numbers_travel_as_they_are() -> None:
    numbers = (0, 5, 2**40)
    for message in (Decision(numbers), Announcement(numbers)):
        assert message.to_bytes()[8:] == array.array("Q", numbers).tobytes()
