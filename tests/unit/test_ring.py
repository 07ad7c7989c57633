"""Messages through shared memory, with threads in the place of processes."""

import mmap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest

from mpistrat.transport.shm.ring import ShmRing, ring_bytes
from mpistrat.transport.shm.segment import ASLEEP, HostMemory

from ..support.shared_memory_of_threads import channels_of

LONG_S = 20.0


@pytest.fixture
def trio() -> Iterator[list[ShmRing]]:
    """The channels of ranks 4, 5 and 6 of a host; 5 and 6 exchange messages with 4 only."""
    ranks, edges = (4, 5, 6), [(5, 4), (6, 4)]
    block = mmap.mmap(-1, HostMemory.size_for(3, 128 + ring_bytes(edges)))
    rings = [ShmRing(HostMemory(block, index, ranks), 128, edges, channel)
             for index, channel in enumerate(channels_of(ranks))]
    yield rings
    for channel in rings:
        channel.close()


def received(channel: ShmRing, count: int) -> list[tuple[int, bytes]]:
    messages = channel.receive()
    while len(messages) < count:
        assert channel.wait(LONG_S), f"only {len(messages)} of {count} messages have come"
        messages += channel.receive()
    return messages


def test_messages_say_who_sent_them(trio: list[ShmRing]) -> None:
    trio[1].send(4, b"from five")
    trio[2].send(4, b"from six")
    trio[0].send(6, b"from four")
    assert sorted(trio[0].receive()) == [(5, b"from five"), (6, b"from six")]
    assert trio[1].receive() == []
    assert trio[2].receive() == [(4, b"from four")]
    assert trio[0].receive() == []


@pytest.mark.parametrize("size", [0, 1, 8187, 8188, 8189, 8192, 20_000, 300_000])
def test_a_message_of_any_size_arrives_whole(trio: list[ShmRing], size: int) -> None:
    sent = [bytes((i + k) % 251 for i in range(size)) for k in range(3)]

    def send_all() -> None:
        for message in sent:
            trio[1].send(4, message)
        while trio[1].is_sending:
            trio[1].flush()

    thread = threading.Thread(target=send_all)
    thread.start()
    assert received(trio[0], 3) == [(5, message) for message in sent]
    thread.join()


def test_what_finds_no_room_waits_in_the_sender(trio: list[ShmRing]) -> None:
    trio[1].send(4, bytes(10_000))
    trio[1].send(4, b"last")
    assert trio[1].is_sending
    assert trio[1].is_sending_to([4])
    assert not trio[1].is_sending_to([5, 6])
    assert trio[0].receive() == []
    trio[1].flush()
    assert trio[0].receive() == [(5, bytes(10_000)), (5, b"last")]
    assert not trio[1].is_sending


def test_a_wait_ends_without_a_message(trio: list[ShmRing]) -> None:
    assert not trio[0].wait(0.01)
    with patch.object(trio[0]._channel, "wait", return_value=False) as sleep:
        assert not trio[0].wait(0.5, spin_s=0.125)
    sleep.assert_called_once_with(0.375)


@pytest.mark.parametrize("spin_s", [0.0, 1e-4])
@pytest.mark.parametrize("messages", [[], [(5, b"up")]], ids=["another thread", "a message"])
def test_a_rank_that_sleeps_is_woken(trio: list[ShmRing], spin_s: float, messages: list[tuple[int, bytes]]) -> None:
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(trio[0].wait, LONG_S, spin_s)
        while not trio[1]._memory.counter_of(4, ASLEEP):
            pass
        if messages:
            trio[1].send(4, b"up")
        else:
            trio[0].wake()
        assert waiting.result(LONG_S)
    assert trio[0].receive() == messages


def test_a_wake_before_a_wait_ends_it(trio: list[ShmRing]) -> None:
    trio[0].wake()
    assert trio[0].wait(LONG_S)


def test_a_thousand_questions_are_answered(trio: list[ShmRing]) -> None:
    def answer() -> None:
        for _ in range(1000):
            (sender, text), = received(trio[0], 1)
            trio[0].send(sender, text + b"!")

    with ThreadPoolExecutor(1) as thread:
        answering = thread.submit(answer)
        for number in range(1000):
            trio[1].send(4, b"%d" % number)
            assert received(trio[1], 1) == [(4, b"%d!" % number)]
        answering.result(LONG_S)


def test_what_is_written_while_a_rank_reads_is_read_the_next_time(trio: list[ShmRing],
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """The fence covers what the counter said before it; later bytes may not be visible yet on every processor."""
    memory = trio[0]._memory
    fence = memory.fence

    def fence_in_which_another_message_comes() -> None:
        monkeypatch.setattr(memory, "fence", fence)
        trio[1].send(4, b"second")
        fence()

    trio[1].send(4, b"first")
    monkeypatch.setattr(memory, "fence", fence_in_which_another_message_comes)
    assert trio[0].receive() == [(5, b"first")]
    assert trio[0].receive() == [(5, b"second")]


def test_a_rank_that_was_interrupted_in_a_fence_can_still_tell_of_its_failure(trio: list[ShmRing]) -> None:
    trio[1]._memory._release()
    trio[1]._memory.abandon()
    trio[1].send(4, b"failed")
    assert trio[0].receive() == [(5, b"failed")]
