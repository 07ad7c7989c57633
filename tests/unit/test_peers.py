"""Peers: each side learns how the other ends. Both sides are in this process; a death is a socket that closes."""

import contextlib
import errno
import queue
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from mpistrat.process.connection import Connection
from mpistrat.process.peers import End, Peers

LIMIT_S = 10.0
HERE = ["127.0.0.1"]


class Star:
    """A centre and two other ranks, 1 and 2; `ended` has what the centre notices."""

    def __init__(self) -> None:
        self.ended: queue.SimpleQueue[tuple[int, End]] = queue.SimpleQueue()
        self.centre, self.others = Peers(0), {rank: Peers(rank) for rank in (1, 2)}
        self.invitation = self.centre.listen([1, 2], HERE, is_local=True)
        self.connections = {rank: other.connect(self.invitation, 0, LIMIT_S) for rank, other in self.others.items()}
        self.centre.await_all(LIMIT_S)
        self.centre.watch(lambda rank, end: self.ended.put((rank, end)))
        for other in self.others.values():
            other.watch()


@pytest.fixture
def star() -> Iterator[Star]:
    made = Star()
    yield made
    for peers in (made.centre, *made.others.values()):
        peers.stop()


def test_nobody_hears_anything_while_all_live(star: Star) -> None:
    assert star.others[1].end_of(0, 0.01) is None
    assert star.ended.empty()


def test_all_hear_that_the_centre_leaves_and_remember_it(star: Star) -> None:
    star.centre.leave()
    star.centre.stop()
    for other in star.others.values():
        assert [other.end_of(0, LIMIT_S), other.end_of(0, 0), other.died] == [End.LEFT, End.LEFT, set()]


@pytest.mark.parametrize(("end", "died"), [(End.DIED, {1}), (End.LEFT, set())])
def test_the_centre_hears_of_an_end_at_once_and_tells_the_others_of_deaths_when_it_leaves(
        end: End, died: set[int], star: Star) -> None:
    (star.others[1].stop if end is End.DIED else star.others[1].leave)()
    assert star.ended.get(timeout=LIMIT_S) == (1, end)
    star.centre.leave()
    assert star.others[2].end_of(0, LIMIT_S) is End.LEFT and star.others[2].died == star.centre.died == died
    assert end is End.DIED or star.others[1].end_of(0, LIMIT_S) is End.LEFT


def test_a_death_just_before_the_centre_leaves_is_told_too() -> None:
    centre, other = Peers(0), Peers(1)
    other.connect(centre.listen([1], HERE), 0, LIMIT_S)
    centre.await_all(LIMIT_S)
    other.stop()
    centre.leave()
    assert centre.died == {1}
    centre.stop()


def test_the_death_of_the_centre_is_noticed(star: Star) -> None:
    star.centre.stop()
    assert [other.end_of(0, LIMIT_S) for other in star.others.values()] == [End.DIED, End.DIED]


def test_a_host_that_does_not_answer_is_lost(star: Star, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's answer to probes that are not answered, which is that of a read; hosts in namespaces prove the rest.
    monkeypatch.setattr(Connection, "receive", Mock(side_effect=OSError(errno.ETIMEDOUT, "Connection timed out")))
    star.others[2].stop()
    assert star.ended.get(timeout=LIMIT_S) == (2, End.HOST_LOST)
    assert star.centre.died == {2}


def test_a_rank_that_does_not_come_is_named() -> None:
    centre, other = Peers(0), Peers(1)
    invitation = centre.listen([1, 2], HERE)
    other.connect(invitation, 0, LIMIT_S)
    with pytest.raises(OSError, match=r"ranks \[2\] have not connected to rank 0"):
        centre.await_all(0.2)
    centre.stop()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", invitation.port))
    other.stop()


def test_only_ranks_of_the_job_are_taken_and_none_when_all_are_there() -> None:
    centre, other = Peers(0, (1, 5)), Peers(2, (1, 5))
    invitation = centre.listen([2], HERE)
    with socket.create_connection(("127.0.0.1", invitation.port)) as stranger:
        stranger.sendall(b"x" * 36)
        stranger.settimeout(LIMIT_S)
        with contextlib.suppress(ConnectionResetError):  # There was something unread.
            while stranger.recv(100):
                pass
    other.connect(invitation, 0, LIMIT_S)
    centre.await_all(LIMIT_S)
    with pytest.raises(ConnectionRefusedError):
        for _ in range(int(LIMIT_S / 0.05)):
            socket.create_connection(("127.0.0.1", invitation.port)).close()
            threading.Event().wait(0.05)
    other.stop()
    centre.stop()


def test_stopping_twice_and_in_the_callback_does_nothing_more() -> None:
    centre, other, stopped = Peers(0), Peers(1), threading.Event()

    def stop(rank: int, end: End) -> None:
        other.stop()
        stopped.set()

    other.connect(centre.listen([1], HERE), 0, LIMIT_S)
    other.watch(stop)
    centre.stop()
    assert stopped.wait(LIMIT_S)
    other.stop()
    centre.stop()
