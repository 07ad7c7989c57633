"""Connections between processes of a job: messages, ends, and who is rejected."""

import errno
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection as Stream
from queue import SimpleQueue
from typing import Any

import pytest

from mpistrat.process import connection as connection_module
from mpistrat.process.connection import Connection, Listening, Message, connect

LIMIT_S = 10.0
Address = tuple[str, int]


@pytest.fixture
def listening() -> "Iterator[tuple[tuple[str, int], bytes, SimpleQueue[Connection]]]":
    secret, connections = secrets.token_bytes(32), SimpleQueue[Connection]()
    listener = socket.create_server(("127.0.0.1", 0))
    listening = Listening(listener, secret, connections.put)
    yield listener.getsockname()[:2], secret, connections
    listening.close()


def test_messages_arrive_in_order_and_the_end_is_noticed(listening) -> None:
    address, secret, connections = listening
    connection = connect([("127.0.0.1", 1), address], secret, 5.0)
    other, taken = connections.get(timeout=5), SimpleQueue[Message | None]()
    other.read(lambda _, message: taken.put(message))
    for number in range(100):
        assert connection.send(kind="count", number=number)
    assert [taken.get(timeout=5)["number"] for _ in range(100)] == list(range(100))
    connection.close()
    connection.close()
    assert taken.get(timeout=5) is None


def test_who_does_not_know_the_secret_gets_no_line(listening) -> None:
    address, secret, connections = listening
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        connect([address], b"another secret", 5.0)
    with socket.create_connection(address) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 100)
        connect([address], secret, 5.0).send(kind="hello")
    assert connections.get(timeout=5).receive() == {"kind": "hello"}
    assert connections.empty()


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ECONNABORTED])
def test_after_a_connection_that_cannot_be_accepted_others_can(code: int) -> None:
    problems = [OSError(code, "odd")]

    class Listener(socket.socket):
        def accept(self) -> tuple[socket.socket, Any]:
            if problems:
                raise problems.pop()
            return super().accept()

    listener, connections = Listener(fileno=socket.create_server(("127.0.0.1", 0)).detach()), SimpleQueue[Connection]()
    listening = Listening(listener, b"secret", connections.put)
    connect([listener.getsockname()], b"secret", LIMIT_S)
    assert connections.get(timeout=LIMIT_S)
    listening.close()


def closed_by_the_listener(stranger: socket.socket) -> bool:
    stranger.settimeout(LIMIT_S)
    try:
        while stranger.recv(100):
            pass
    except ConnectionResetError:
        pass  # There was something unread.
    stranger.close()
    return True


@pytest.mark.parametrize("said", [b"", b"\0\0", b"\0\0\0\x40" + bytes(63)], ids=len)
def test_strangers_that_say_nothing_more_hold_up_nobody(listening, said: bytes,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    # More than may wait at once; all of them come before the rank. Only a failing test waits for so long.
    monkeypatch.setattr(connection_module, "_PROOF_LIMIT_S", 3600.0)
    monkeypatch.setattr(connection_module, "_MOST_STRANGERS", 5)
    address, secret, connections = listening
    strangers = [socket.create_connection(address) for _ in range(12)]
    for stranger in strangers:
        stranger.sendall(said)
    connect([address], secret, LIMIT_S).send(kind="hello")
    assert connections.get(timeout=LIMIT_S).receive() == {"kind": "hello"}
    assert all(closed_by_the_listener(stranger) for stranger in strangers[:7])


def test_a_stranger_has_only_so_long(listening, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_PROOF_LIMIT_S", 0.05)
    assert closed_by_the_listener(socket.create_connection(listening[0]))


def test_a_process_that_listens_without_the_secret_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        address: Address = impostor.getsockname()[:2]
        Listening(impostor, b"another secret", lambda connection: None)
        with pytest.raises(OSError, match=rf"^127\.0\.0\.1:{address[1]}: the other end has closed the connection"):
            connect([address], b"secret", LIMIT_S)


def test_the_proof_of_the_listening_side_is_checked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        def accept() -> None:
            connection = Stream(impostor.accept()[0].detach())
            connection.send_bytes(bytes(32))
            connection.recv_bytes()
            connection.send_bytes(bytes(32))
        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(OSError, match="does not know the secret of the job"):
            connect([impostor.getsockname()[:2]], b"secret", LIMIT_S)
        thread.join()


def test_the_first_address_that_works_is_taken(listening) -> None:
    address, secret, _ = listening
    connection = connect([("no such name", 1), address], secret, LIMIT_S)
    assert (connection.peer[0], connection.own[0]) == ("127.0.0.1", "127.0.0.1")
    with pytest.raises(OSError, match=r"^127\.0\.0\.1:1: .*refused; no such name:1: "):
        connect([("127.0.0.1", 1), ("no such name", 1)], secret, LIMIT_S)
    with pytest.raises(OSError, match="the other process has no address"):
        connect([], secret, LIMIT_S)


@pytest.mark.parametrize("text", [b"[1", b"[]", b"7", b"\xff"])
def test_a_message_that_is_no_object_is_the_end_of_the_line(listening, text: bytes) -> None:
    address, secret, connections = listening
    connect([address], secret, LIMIT_S)._stream.send_bytes(text)
    with pytest.raises(OSError, match="the other end has sent an unknown message"):
        connections.get(timeout=LIMIT_S).receive()


def test_who_listens_no_more_refuses() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    address: Address = listener.getsockname()[:2]
    listening = Listening(listener, b"secret", lambda connection: None)
    listening.close()
    listening.close()
    with pytest.raises(OSError, match="refused"):
        connect([address], b"secret", LIMIT_S)


def test_a_process_that_was_forked_does_not_keep_a_line_open(listening) -> None:
    address, secret, connections = listening
    connection = connect([address], secret, LIMIT_S)
    other = connections.get(timeout=LIMIT_S)
    waits, goes_on = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(goes_on)
        os.read(waits, 1)
        os._exit(0)
    os.close(waits)
    try:
        connection._stream.close()  # as the end of this process would
        with pytest.raises(OSError, match="closed the connection"):
            other.receive()
    finally:
        os.close(goes_on)
        os.waitpid(child, 0)
