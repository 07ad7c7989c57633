"""Liveness: each side learns how the other ends. Both sides are in this process; a death is a socket that closes."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mpistrat.core.errors import RankDiedError
from mpistrat.tensorflow.cluster import liveness
from mpistrat.tensorflow.cluster.liveness import LivenessClient, LivenessServer

TOKEN = b"t" * 32
LIMIT_S = 10.0


class Pair:
    """A chief and two other ranks, 1 and 2; `ended` collects what the chief hears."""

    def __init__(self) -> None:
        self.chief = LivenessServer(local=True)
        self.others = {rank: LivenessClient(["127.0.0.1"], self.chief.port, TOKEN, rank) for rank in (1, 2)}
        self.chief.accept([1, 2], TOKEN)
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


def test_a_process_that_a_rank_has_forked_does_not_keep_its_connection_open(pair: Pair) -> None:
    waits, goes_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(goes_on)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        pair.others[1].close()
        assert pair.heard.wait(LIMIT_S)
        assert pair.ended == [(1, True)]
    finally:
        os.close(goes_on)
        os.waitpid(child, 0)


def test_the_chief_hears_of_a_death_at_once_and_tells_the_others_at_the_end(pair: Pair) -> None:
    pair.others[1].close()
    assert pair.heard.wait(LIMIT_S)
    assert pair.ended == [(1, True)]
    assert pair.chief.close() == (1,)
    assert pair.others[2].wait(LIMIT_S) == (1,)


def test_a_death_just_before_the_end_is_told_too() -> None:
    chief = LivenessServer(local=True)
    line = LivenessClient(["127.0.0.1"], chief.port, TOKEN, 1)
    chief.accept([1], TOKEN)
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
        line = LivenessClient(["127.0.0.1"], listener.getsockname()[1], TOKEN, 1)
        listener.accept()[0].close()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RankDiedError, match="rank 0, the chief, has died"):
        patch.setattr(liveness, "_LAUNCHER_S", 0.0)
        line.wait(LIMIT_S)
    line.close()


def test_strangers_are_turned_away() -> None:
    chief = LivenessServer(local=True)
    stranger = socket.create_connection(("127.0.0.1", chief.port))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost:1234\r\n\r\n")
    other_job = LivenessClient(["127.0.0.1"], chief.port, b"u" * 32, 1)
    line = LivenessClient(["127.0.0.1"], chief.port, TOKEN, 1)
    chief.accept([1], TOKEN)
    chief.close()
    assert line.wait(LIMIT_S) == ()
    for end in (stranger, other_job, line):
        end.close()


@pytest.mark.parametrize("said", [b"", TOKEN, TOKEN + b"\0\0\0"], ids=len)
def test_strangers_that_say_nothing_more_hold_up_nobody(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    # More than the chief lets in at once; all of them come before the rank. Only a failing test waits for so long.
    monkeypatch.setattr(liveness, "_HELLO_LIMIT_S", 3600.0)
    monkeypatch.setattr(liveness, "_MAX_UNIDENTIFIED", 5)
    chief = LivenessServer(local=True)
    strangers = [socket.create_connection(("127.0.0.1", chief.port)) for _ in range(12)]
    for stranger in strangers:
        stranger.sendall(said)
    line = LivenessClient(["127.0.0.1"], chief.port, TOKEN, 1)
    chief.accept([1], TOKEN)
    for stranger in strangers:
        stranger.settimeout(LIMIT_S)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # The chief had something unread.
        stranger.close()
    chief.close()
    assert line.wait(LIMIT_S) == ()
    line.close()


def test_a_stranger_has_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_HELLO_LIMIT_S", 0.05)
    chief = LivenessServer(local=True)
    stranger = socket.create_connection(("127.0.0.1", chief.port))
    with ThreadPoolExecutor(1) as thread:
        accepting = thread.submit(chief.accept, [1], TOKEN)
        stranger.settimeout(LIMIT_S)
        assert stranger.recv(1) == b""
        monkeypatch.setattr(liveness, "_HELLO_LIMIT_S", LIMIT_S)
        line = LivenessClient(["127.0.0.1"], chief.port, TOKEN, 1)
        accepting.result(LIMIT_S)
    chief.close()
    for end in (stranger, line):
        end.close()


def test_a_hello_that_comes_in_parts_is_understood() -> None:
    chief = LivenessServer(local=True)
    with ThreadPoolExecutor(1) as thread, socket.create_connection(("127.0.0.1", chief.port)) as line:
        accepting = thread.submit(chief.accept, [1], TOKEN)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in TOKEN + b"\0\0\0\1":
            line.sendall(bytes([byte]))
        accepting.result(LIMIT_S)
        chief.close()
        assert line.recv(10) == b"[]"


def test_strangers_do_not_prolong_the_wait_for_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_ACCEPT_LIMIT_S", 0.2)
    chief = LivenessServer(local=True)
    is_over = threading.Event()

    def connect() -> None:
        while not is_over.is_set():
            socket.create_connection(("127.0.0.1", chief.port)).close()

    with ThreadPoolExecutor(1) as thread:
        connecting = thread.submit(connect)
        with pytest.raises(OSError, match=r"no connection of ranks \[1\] has arrived here"):
            chief.accept([1], TOKEN)
        is_over.set()
        connecting.result(LIMIT_S)
    chief.close()


@pytest.mark.parametrize("text", [b"[1", b"{}", b"[1.5]", b"[-1]", b"[true]", b"7", b"\xff", b"[" * 10_000,
                                  b" " * (liveness._MAX_FAREWELL_BYTES + 1) + b"[]"],
                         ids=lambda text: text[:9].decode("latin-1").strip())
def test_a_farewell_that_is_none_is_the_death_of_the_chief(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_LAUNCHER_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        line = LivenessClient(["127.0.0.1"], listener.getsockname()[1], TOKEN, 1)
        waiting = thread.submit(line.wait, LIMIT_S)
        with listener.accept()[0] as other:
            other.sendall(text)
            other.shutdown(socket.SHUT_WR)
            with pytest.raises(RankDiedError, match="rank 0, the chief, has died"):
                waiting.result(LIMIT_S)
    line.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_ACCEPT_LIMIT_S", 0.05)
    chief = LivenessServer(local=True)
    line = LivenessClient(["127.0.0.1"], chief.port, TOKEN, 1)
    with pytest.raises(OSError, match=r"no connection of ranks \[2\] has arrived here"):
        chief.accept([1, 2], TOKEN)
    chief.close()
    line.close()


def test_the_first_address_that_works_is_taken() -> None:
    chief = LivenessServer(local=False)
    line = LivenessClient(["no such name", "127.0.0.1"], chief.port, TOKEN, 1)
    assert (line.chief_address, line.own_address) == ("127.0.0.1", "127.0.0.1")
    line.close()
    chief.close()


def test_a_chief_that_cannot_be_reached_is_an_error_with_all_addresses() -> None:
    chief = LivenessServer(local=True)
    chief.close()
    with pytest.raises(OSError, match=rf"^127\.0\.0\.1:{chief.port}: .*refused; no such name:{chief.port}: "):
        LivenessClient(["127.0.0.1", "no such name"], chief.port, TOKEN, 1)


def test_closing_twice_does_nothing_more(pair: Pair) -> None:
    assert [pair.chief.close(), pair.chief.close()] == [(), ()]
    pair.others[1].close()
    pair.others[1].close()
