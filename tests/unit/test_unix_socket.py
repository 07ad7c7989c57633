"""Messages among the ranks of one host."""

import array
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from mpistrat.core.errors import MessageError
from mpistrat.transport import unix_socket
from mpistrat.transport.unix_socket import ChannelSockets, UnixSocketChannel

from ..support import shared_memory_of_threads

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's sockets only")

LONG_S = 30.0  # only a failing test waits for so long


@pytest.fixture
def make_channels() -> Iterator[Callable[[int], list[UnixSocketChannel]]]:
    opened: list[UnixSocketChannel] = []

    def make(ranks: int) -> list[UnixSocketChannel]:
        opened.extend(shared_memory_of_threads.channels_of(range(ranks)))
        return opened[-ranks:]

    yield make
    for channel in opened:
        channel.close()


Make = Callable[[int], list[UnixSocketChannel]]


def fill(sender: UnixSocketChannel, receiver: int, message: bytes = b"x") -> int:
    for count in range(1, 100_000):
        sender.send(receiver, message)
        if sender.is_sending:
            return count
    raise AssertionError("the queue has no end")


def receive_all(receiver: UnixSocketChannel, *senders: UnixSocketChannel) -> list[tuple[int, bytes]]:
    messages = receiver.receive()
    while any(sender.is_sending for sender in senders):
        for sender in senders:
            sender.flush()
        messages += receiver.receive()
    return messages + receiver.receive()


@pytest.mark.parametrize("size", [0, 1, 32 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 64 * 1024, 1_000_000])
def test_a_message_of_any_length_arrives_whole(make_channels: Make, size: int) -> None:
    first, second = make_channels(2)
    message = random.Random(size).randbytes(size)
    first.send(1, message)
    first.send(1, b"next")
    assert receive_all(second, first) == [(0, message), (0, b"next")]


def test_a_message_is_not_delivered_before_its_last_part_is_there(make_channels: Make) -> None:
    first, second = make_channels(2)
    fill(first, 1)
    first.send(1, b"y" * 100_000)
    while first.is_sending:
        assert all(message == b"x" for _, message in second.receive())
        first.flush()
    assert second.receive()[-1] == (0, b"y" * 100_000)


def test_the_parts_of_several_senders_are_not_mixed_up(make_channels: Make) -> None:
    receiver, *senders = make_channels(4)
    sent = {rank: [bytes([rank]) * (50_000 * (number + 1)) for number in range(4)] for rank in (1, 2, 3)}
    for number in range(4):
        for rank, sender in enumerate(senders, 1):
            sender.send(0, sent[rank][number])
    got = receive_all(receiver, *senders)
    for rank, messages in sent.items():
        assert [message for sender, message in got if sender == rank] == messages


def test_a_full_queue_loses_nothing_and_keeps_the_order(make_channels: Make) -> None:
    first, second = make_channels(2)
    count = fill(first, 1)
    for number in range(300):
        first.send(1, f"{number}".encode())
    got = [message for _, message in receive_all(second, first)]
    assert got == [b"x"] * count + [f"{number}".encode() for number in range(300)]


def test_a_full_queue_of_one_receiver_does_not_hold_up_another(make_channels: Make) -> None:
    first, second, third = make_channels(3)
    fill(first, 1)
    first.send(2, b"to 2")
    assert third.receive() == [(0, b"to 2")]
    assert first.is_sending_to([1])
    assert not first.is_sending_to([0, 2])
    receive_all(second, first)
    assert not first.is_sending_to([1])


def test_a_wait_without_a_message_ends_in_time(make_channels: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    channel, = make_channels(1)
    assert not channel.wait(0)
    assert not channel.wait(0.001)
    assert not channel.wait(0.001, spin_s=LONG_S)
    slept: list[float] = []
    monkeypatch.setattr(channel, "_await", slept.append)
    assert not channel.wait(0.5, spin_s=0.125) and slept[-1] == 0.375


@pytest.mark.parametrize(("limit", "spin_s"), [(0, 0.0), (10**6, 0.0), (10**6, 1e-4), (10**6, LONG_S)],
                         ids=["poll", "select", "spin and sleep", "spin"])
@pytest.mark.parametrize("messages", [[(0, b"come")], []], ids=["message", "wake"])
def test_a_message_and_a_wake_end_a_wait(make_channels: Make, messages: list[tuple[int, bytes]], limit: int,
                                         spin_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # A descriptor above the limit of select() is waited for in another way.
    monkeypatch.setattr(unix_socket, "_SELECT_LIMIT", limit)
    first, second = make_channels(2)
    threading.Thread(target=(lambda: first.send(1, b"come")) if messages else second.wake).start()
    assert second.wait(LONG_S, spin_s)
    assert second.receive() == messages


@pytest.mark.parametrize("wakes", [1, 1000])
def test_wakes_before_the_wait_end_one_wait_and_are_no_messages(make_channels: Make, wakes: int) -> None:
    channel, = make_channels(1)
    for _ in range(wakes):
        channel.wake()
    assert channel.wait(LONG_S)
    assert channel.receive() == []
    assert not channel.wait(0)


def test_many_wakes_leave_room_for_messages(make_channels: Make) -> None:
    first, second = make_channels(2)
    room = fill(first, 1)
    receive_all(second, first)
    for _ in range(1000):
        second.wake()
    assert fill(first, 1) >= room - 1


@pytest.mark.parametrize(("waker", "nbytes"), [(1, 1), (0, 30_000)], ids=["the reader", "the writer"])
def test_a_wake_while_a_queue_is_full_is_not_the_last_one(make_channels: Make, waker: int, nbytes: int) -> None:
    # What a rank has sent and nobody has read takes room among the rank's own buffers.
    channels = make_channels(2)
    fill(channels[0], 1, b"x" * nbytes)
    for _ in range(2):
        channels[waker].wake()
        assert channels[waker].wait(LONG_S)
        channels[waker].receive()
        receive_all(channels[1], channels[0])


def test_no_wake_is_lost_among_threads(make_channels: Make) -> None:
    channel, = make_channels(1)
    todo: list[int] = []

    def work() -> None:
        for number in range(200):
            todo.append(number)
            channel.wake()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    done = 0
    while done < 4 * 200:
        # As the engine does: first the messages, then the work. What is added after that has a wake of its own.
        channel.receive()
        done += len(todo[done:])
        assert done == 4 * 200 or channel.wait(LONG_S)
    for thread in threads:
        thread.join(LONG_S)


def test_what_waits_for_a_receiver_that_closes_is_dropped(make_channels: Make) -> None:
    first, second = make_channels(2)
    fill(first, 1)
    second.close()
    first.flush()
    assert not first.is_sending


@pytest.mark.parametrize("part", [b"", b"\0", b"\1", b"\2\2", b"\0\0\0\0", b"\3" + bytes(9), b"\0\7\0\0\0x"],
                         ids=["empty", "last only", "more only", "two wakes", "short", "unknown", "unknown rank"])
def test_what_no_rank_sends_is_an_error_that_says_so(make_channels: Make, part: bytes) -> None:
    first, second = make_channels(2)
    first._outboxes[1].send(part)
    with pytest.raises(MessageError, match=r"^this rank received a datagram that is not .*\. Its header: b'.*'\.$"):
        second.receive()
    first.send(1, b"next")
    assert second.receive() == [(0, b"next")]


def test_a_descriptor_that_comes_along_is_not_taken(make_channels: Make) -> None:
    first, second = make_channels(2)
    with open(os.devnull) as extra:
        before = os.listdir("/proc/self/fd")
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [extra.fileno()] * 9))
        first._outboxes[1].sendmsg([b"\0\0\0\0\0x"], [rights])
        assert second.receive() == [(0, b"x")]
        assert os.listdir("/proc/self/fd") == before


def test_descriptors_that_are_no_sockets_for_messages_are_left_to_the_caller() -> None:
    inbox, outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with inbox, outbox, open(os.devnull) as file:
        for wrong in ([inbox.fileno(), outbox.fileno()], [file.fileno(), file.fileno()]):
            with pytest.raises(OSError):
                ChannelSockets.over(wrong, [0])
        outbox.send(b"x")
        assert inbox.recv(1) == b"x"
