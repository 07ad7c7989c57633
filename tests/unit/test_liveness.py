"""Liveness: each side learns how the other ends. Both sides are in this process; a death is a socket that closes."""

import socket
import threading
from collections.abc import Iterator

import pytest

from mpistrat.core.errors import RankDiedError
from mpistrat.process.line import Line, Listening
from mpistrat.tensorflow.cluster import liveness
from mpistrat.tensorflow.cluster.liveness import LivenessClient, LivenessServer

LIMIT_S = 10.0


class Pair:
    """A chief and two other ranks, 1 and 2; `ended` collects what the chief hears."""

    def __init__(self) -> None:
        self.chief = LivenessServer(local=True)
        self.others = {rank: LivenessClient(["127.0.0.1"], self.chief.port, self.chief.token, rank) for rank in (1, 2)}
        self.chief.accept([1, 2])
        self.ended: list[tuple[int, bool]] = []
        self.heard = threading.Event()
        self.chief.watch(self._hear)

    def _hear(self, rank: int, died: bool) -> None:
        self.ended.append((rank, died))
        self.heard.set()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(liveness, "_LAUNCHER_S", 0.0)
    made = Pair()
    yield made
    made.chief.close()
    for line in made.others.values():
        line.close()


def test_nobody_hears_anything_while_all_live(pair: Pair) -> None:
    assert pair.others[1].wait(0.01) is None
    assert pair.ended == []


def test_all_hear_that_the_chief_is_done(pair: Pair) -> None:
    assert pair.chief.close() == ()
    assert [line.wait(LIMIT_S) for line in pair.others.values()] == [(), ()]


def test_what_was_heard_is_remembered(pair: Pair) -> None:
    pair.chief.close()
    assert [pair.others[1].wait(LIMIT_S), pair.others[1].wait(0)] == [(), ()]


def test_the_chief_hears_of_a_death_at_once_and_tells_the_others_at_the_end(pair: Pair) -> None:
    pair.others[1].close()
    assert pair.heard.wait(LIMIT_S)
    assert pair.ended == [(1, True)]
    assert pair.chief.close() == (1,)
    assert pair.others[2].wait(LIMIT_S) == (1,)


def test_a_death_just_before_the_end_is_told_too() -> None:
    chief = LivenessServer(local=True)
    line = LivenessClient(["127.0.0.1"], chief.port, chief.token, 1)
    chief.accept([1])
    line.close()
    assert chief.close() == (1,)


def test_a_rank_that_leaves_has_not_died_and_still_hears_of_the_end(pair: Pair) -> None:
    pair.others[1].leave()
    pair.others[1].leave()
    assert pair.heard.wait(LIMIT_S)
    assert pair.ended == [(1, False)]
    assert pair.chief.close() == ()
    assert pair.others[1].wait(LIMIT_S) == ()


def test_the_death_of_the_chief_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        Listening(listener, b"token", Line.close)
        line = LivenessClient(["127.0.0.1"], listener.getsockname()[1], b"token", 1)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankDiedError, match="rank 0, the chief, has died"):
        patch.setattr(liveness, "_LAUNCHER_S", 0.0)
        line.wait(LIMIT_S)
    line.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_ACCEPT_LIMIT_S", 0.05)
    chief = LivenessServer(local=True)
    line = LivenessClient(["127.0.0.1"], chief.port, chief.token, 1)
    with pytest.raises(OSError, match=r"no connection of ranks \[2\] has arrived here"):
        chief.accept([1, 2])
    chief.close()
    line.close()


def test_a_chief_that_cannot_be_reached_is_an_error_with_all_addresses() -> None:
    chief = LivenessServer(local=True)
    chief.close()
    with pytest.raises(OSError, match=rf"^127\.0\.0\.1:{chief.port}: .*refused; no such name:{chief.port}: "):
        LivenessClient(["127.0.0.1", "no such name"], chief.port, chief.token, 1)


def test_closing_twice_does_nothing_more(pair: Pair) -> None:
    assert [pair.chief.close(), pair.chief.close()] == [(), ()]
    pair.others[1].close()
    pair.others[1].close()
