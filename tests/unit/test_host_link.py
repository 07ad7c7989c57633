"""How the ranks of a host come to their sockets and their memory, with threads in the place of processes, and what a
process of another user can do about it."""

import array
import gc
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mpistrat.transport import host_link
from mpistrat.transport.host_link import FdExchange, HostLink, Invitation, close_all
from mpistrat.transport.unix_socket import UnixSocketChannel

from ..support.strangers import NOBODY, become_nobody, names_of, needs_another_user
from ..support.threads import on_all

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's sockets only")

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def open_descriptors() -> Iterator[None]:
    """Nothing may be left open."""
    gc.collect()  # What tests before have left is not closed within this one.
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def linked(ranks: Sequence[int]) -> tuple[list[HostLink], list[UnixSocketChannel]]:
    links = [HostLink(rank, ranks) for rank in ranks]
    return links, on_all(len(ranks), lambda index: links[index].connect(links[0].invitation))


def close(*opened: Any) -> None:
    for each in opened:
        each.close()


def received(mail: UnixSocketChannel) -> list[tuple[int, bytes]]:
    assert mail.wait(LIMIT_S)
    return mail.receive()


# -- among ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(4,), (0, 1), (3, 5, 9), range(7, 27)], ids=len)
def test_every_rank_can_write_to_every_rank(ranks: Sequence[int]) -> None:
    links, mails = linked(ranks)
    for sender, mail in zip(ranks, mails, strict=True):
        for receiver in (ranks[0], ranks[len(ranks) // 2], ranks[-1]):
            mail.send(receiver, b"%d to %d" % (sender, receiver))
            assert received(mails[ranks.index(receiver)]) == [(sender, b"%d to %d" % (sender, receiver))]
    mails[0].wake_rank(ranks[-1])
    assert mails[-1].wait(LIMIT_S)
    close(*links, *mails)


def test_the_ranks_of_a_host_come_to_the_same_memory() -> None:
    links, mails = linked((3, 5, 9))
    # A rank has no room, and all try with less.
    assert len(links[0].file().map(2**20)) == 2**20
    blocks = [link.file().map(8192) for link in links]
    close(*links)
    blocks[1][99] = 42
    assert [block[99] for block in blocks] == [42, 42, 42]
    close(*mails)


def test_a_file_that_is_not_there_is_an_error_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=OSError("no space")))
    links, mails = linked((0, 1))
    for link, text in zip(links, ["no space", "rank 0 could not make the file of shared memory"]):
        with pytest.raises(OSError, match=f"^{text}$"):
            link.file()
    mails[0].send(1, b"all the same")
    assert received(mails[1]) == [(0, b"all the same")]
    close(*links, *mails)


def test_what_is_sent_to_a_rank_that_has_ended_is_dropped() -> None:
    links, mails = linked((0, 1, 2))
    mails[1].close()
    for _ in range(3):
        mails[0].send(1, b"lost")
        mails[0].wake_rank(1)
        mails[2].send(1, b"lost")
    assert not mails[0].is_sending and not mails[2].is_sending
    close(*links, *mails, *links)


def test_nothing_that_connects_ranks_has_a_name() -> None:
    links = [HostLink(rank, (0, 1)) for rank in (0, 1)]
    invitation = links[0].invitation
    assert names_of(os.getpid()) == [f"@{invitation.name}"]  # as long as they come together
    mails = on_all(2, lambda index: links[index].connect(invitation))
    assert names_of(os.getpid()) == []
    close(*links, *mails)


def test_what_is_passed_on_is_closed_when_a_program_is_executed() -> None:
    links, mails = linked((0, 1))
    for mail in mails:
        assert not any(end.get_inheritable() for end in (mail._socket, *mail._outboxes.values()))
    assert not any(os.get_inheritable(link.file().descriptor) for link in links)
    close(*links, *mails)


# -- when something is missing ----------------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "_LIMIT_S", 0.2)
    link = HostLink(0, (0, 1, 2))
    with pytest.raises(OSError, match=r"^ranks \[1, 2\] have not connected to rank 0 on the same host in 0 s\. Do "):
        link.connect(link.invitation)
    link.close()


def test_a_first_rank_that_has_gone_is_an_error_at_once() -> None:
    links = [HostLink(rank, (0, 1)) for rank in (0, 1)]
    invitation = links[0].invitation
    links[0].close()
    with pytest.raises(OSError, match=r"^rank 0 on the same host cannot be reached: .*refused"):
        links[1].connect(invitation)
    with pytest.raises(OSError, match=r"^rank 0, on this host, could not open its listening socket$"):
        links[1].connect(None)


def test_a_first_rank_that_ends_before_it_gives_anything_is_an_error() -> None:
    links = [HostLink(rank, (0, 1)) for rank in (0, 1)]
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(links[1].connect, links[0].invitation)
        line, _ = links[0]._exchange._listener.accept()
        line.recv(100)
        line.close()
        with pytest.raises(OSError, match=r"^rank 0 on the same host has ended, or sends no descriptors$"):
            taking.result(LIMIT_S)
    links[0].close()


def test_a_rank_that_ends_before_it_has_taken_all_is_named() -> None:
    exchange = FdExchange(0, (0, 1))
    invitation = exchange.invitation
    with connected(invitation) as line, open(os.devnull) as file:
        line.send(host_link._GREETING.pack(invitation.secret[:16], 1))
        line.close()
        with pytest.raises(OSError, match=r"^rank 1 has not received the descriptors of rank 0: "):
            exchange.give({1: [file.fileno()]})
    exchange.close()


def connected(invitation: Invitation) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect("\0" + invitation.name)
    return line


def test_messages_name_ranks_of_the_job() -> None:
    with pytest.raises(OSError, match=r"^rank 4, on this host, could not open"):
        HostLink(1, (0, 1), (4, 6)).connect(None)
    with pytest.raises(OSError, match=r"^rank 4 could not make the file of shared memory"):
        HostLink(1, (0, 1), (4, 6)).file()


def test_many_descriptors_go_in_several_messages() -> None:
    exchange, made = FdExchange(0, (0, 1)), os.memfd_create("test")
    copies = [os.dup(made) for _ in range(300)]
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(FdExchange(1, (0, 1)).take, exchange.invitation)
        exchange.give({1: copies})
        taken = taking.result(LIMIT_S)
    assert len(taken) == 300
    assert {os.fstat(descriptor).st_ino for descriptor in taken} == {os.fstat(made).st_ino}
    close_all([made, *taken, *copies])
    exchange.close()


def test_a_process_that_may_not_have_so_many_says_so_and_keeps_none() -> None:
    exchange, made = FdExchange(0, (0, 1)), os.memfd_create("test")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (made + 20, limits[1]))
    try:
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(FdExchange(1, (0, 1)).take, exchange.invitation)
            with pytest.raises(OSError, match=r"^rank 1 has not received the descriptors of rank 0: "):
                exchange.give({1: [made] * 40})
            with pytest.raises(OSError, match=r"^this rank received only some of the 40 .* 0\. .*ulimit"):
                taking.result(LIMIT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.close(made)
    exchange.close()


# -- processes of this user that do not belong to the job -------------------------------------------------------------


@pytest.mark.parametrize("greeting", [
    *(lambda secret, text=text: text for text in (b"", b"x", bytes(20), bytes(1000))),
    *(lambda secret, rank=rank: host_link._GREETING.pack(secret[:16], rank) for rank in (0, 2, 2**32 - 1))],
    ids=["nothing", "1 byte", "20 bytes", "1000 bytes", "rank 0", "rank 2", "no rank"])
def test_a_process_without_the_secret_or_of_a_rank_that_is_not_awaited_gets_nothing(
        greeting: Callable[[bytes], bytes]) -> None:
    links = [HostLink(rank, (0, 1)) for rank in (0, 1)]
    invitation = links[0].invitation
    with connected(invitation) as line, open(os.devnull) as file:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 5))
        line.sendmsg([greeting(invitation.secret)], [rights])
        mails = on_all(2, lambda index: links[index].connect(invitation))
        assert line.recv(100) == b""
    close(*links, *mails)


def test_a_process_that_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "_GREETING_LIMIT_S", 0.01)
    links = [HostLink(rank, (0, 1)) for rank in (0, 1)]
    with connected(links[0].invitation):
        mails = on_all(2, lambda index: links[index].connect(links[0].invitation))
    close(*links, *mails)


class FalseGiver:
    """Listens in the place of the first rank, and gives what it is told to."""

    def __init__(self) -> None:
        self.invitation = Invitation(f"mpistrat-test-{os.getpid()}", bytes(range(32)))
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind("\0" + self.invitation.name)
        self.listener.listen()

    def give(self, parcel: bytes, descriptors: Sequence[int]) -> str:
        """What rank 1 says of what it gets."""
        with ThreadPoolExecutor(1) as thread:
            taking = thread.submit(HostLink(1, (0, 1)).connect, self.invitation)
            line, _ = self.listener.accept()
            with line:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
                line.sendmsg([parcel], rights)
                with pytest.raises(OSError) as caught:
                    taking.result(LIMIT_S)
        return str(caught.value)


@pytest.fixture
def giver() -> Iterator[FalseGiver]:
    made = FalseGiver()
    yield made
    made.listener.close()


@pytest.mark.parametrize("parcel", [b"", b"x", bytes(16) + struct.pack("=I", 3), bytes(range(16)) + bytes(5)], ids=len)
def test_descriptors_of_who_does_not_know_the_secret_are_closed(giver: FalseGiver, parcel: bytes) -> None:
    with open(os.devnull) as file:
        said = giver.give(parcel, [file.fileno()] * 3)
    assert said in ("the process that answers for rank 0 does not belong to the job",
                    "rank 0 on the same host has ended, or sends no descriptors")


def test_more_or_fewer_descriptors_than_were_said_are_closed(giver: FalseGiver) -> None:
    proof = giver.invitation.secret[16:]
    with open(os.devnull) as file:
        for total, given in ((3, 4), (2, 200), (3, 0)):
            said = giver.give(proof + struct.pack("=I", total), [file.fileno()] * given)
            assert said.startswith(f"this rank received only some of the {total} descriptors "), (total, given)
        assert giver.give(proof + struct.pack("=I", 2), [file.fileno()] * 2) == (
            "rank 0 gave 2 descriptors, not 3, to connect 2 ranks")


def test_descriptors_of_another_kind_are_closed(giver: FalseGiver) -> None:
    proof = giver.invitation.secret[16:] + struct.pack("=I", 3)
    inbox, outbox = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with inbox, outbox, open(os.devnull) as file:
        giver.give(proof, [file.fileno()] * 3)
        assert giver.give(proof, [inbox.fileno(), outbox.fileno(), outbox.fileno()]).endswith("a Unix datagram socket")


def test_memory_that_is_no_sealed_file_is_not_taken() -> None:
    exchange = FdExchange(0, (0, 1))
    link, false = HostLink(1, (0, 1)), os.memfd_create("false")
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(link.connect, exchange.invitation)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        exchange.give({1: [pairs[1][1].fileno(), pairs[0][0].fileno(), pairs[1][0].fileno(), false]})
        mail = taking.result(LIMIT_S)
    with pytest.raises(OSError, match=r"^the received descriptor is not a file of shared memory: "):
        link.file()
    os.close(false)
    close(exchange, link, mail, *pairs[0], *pairs[1])


# -- processes of other users -----------------------------------------------------------------------------------------


def as_nobody(program: str, *arguments: str) -> "subprocess.Popen[str]":
    """Start a program that has imported what it needs, and become another user, before it begins."""
    text = (f"import array, os, socket, sys, time\nfrom {become_nobody.__module__} import become_nobody\n"
            f"become_nobody()\nassert os.geteuid() == {NOBODY}\n{program}")
    return subprocess.Popen([sys.executable, "-c", text, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            text=True, cwd=Path(__file__).parent.parent.parent)


KNOWS_ALL = """
name, secret = "\\0" + sys.argv[1], bytes.fromhex(sys.argv[2])
file = os.memfd_create("stranger")
silent, refused = [], 0
for turn in range(20):
    # Even who knew the secret would be turned away.
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.setblocking(False)
    try:
        line.connect(name)
        if turn % 2:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 9))
            line.sendmsg([secret[:16] + (1).to_bytes(4, sys.byteorder)], [rights])
        silent.append(line)
    except BlockingIOError:
        refused += 1
print("connected", flush=True)
for line in silent:
    line.settimeout(20)
    try:
        got = line.recv(100)
    except ConnectionResetError:
        got = b""
    assert got == b"", got
print("got nothing")
"""


@needs_another_user
def test_another_user_that_comes_first_gets_nothing_and_holds_nobody_up() -> None:
    links = [HostLink(rank, range(5)) for rank in range(5)]
    invitation = links[0].invitation
    stranger = as_nobody(KNOWS_ALL, invitation.name, invitation.secret.hex())
    assert stranger.stdout.readline() == "connected\n"  # so its connections come before those of all ranks
    mails = on_all(5, lambda index: links[index].connect(invitation))
    output, _ = stranger.communicate(timeout=LIMIT_S)
    assert (stranger.returncode, output) == (0, "got nothing\n")
    mails[4].send(0, b"well")
    assert received(mails[0]) == [(4, b"well")]
    close(*links, *mails)


FLOODS = """
name = "\\0" + sys.argv[1]
print("ready", flush=True)
tries = 0
while True:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(name)
        tries += 1
    except ConnectionRefusedError:
        break
    line.close()
    if tries == 100:
        print("under way", flush=True)
print(f"tried {tries >= 100}")
"""


@needs_another_user
def test_another_user_that_connects_without_end_does_not_keep_ranks_out() -> None:
    links = [HostLink(rank, range(9)) for rank in range(9)]
    invitation = links[0].invitation
    stranger = as_nobody(FLOODS, invitation.name)
    assert stranger.stdout.readline() == "ready\n"
    with ThreadPoolExecutor(9) as threads:
        mails = [threads.submit(links[0].connect, invitation)]
        assert stranger.stdout.readline() == "under way\n"
        mails += [threads.submit(link.connect, invitation) for link in links[1:]]
        done = [mail.result(LIMIT_S) for mail in mails]
    output, _ = stranger.communicate(timeout=LIMIT_S)
    assert (stranger.returncode, output) == (0, "tried True\n")
    close(*links, *done)


LISTENS = """
name, secret = "\\0" + sys.argv[1], bytes.fromhex(sys.argv[2])
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(name)
listener.listen()
print("listens", flush=True)
line, _ = listener.accept()
file = os.memfd_create("stranger")
try:
    line.sendmsg([secret[16:] + (4).to_bytes(4, sys.byteorder)],
                 [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file] * 4))])
except BrokenPipeError:
    pass  # It has gone already.
try:
    got = line.recv(100)
except ConnectionResetError:
    got = b""
print("got", got)
"""


@needs_another_user
def test_another_user_that_listens_in_the_place_of_a_rank_is_told_nothing() -> None:
    invitation = Invitation(f"mpistrat-test-{os.getpid()}", os.urandom(32))
    stranger = as_nobody(LISTENS, invitation.name, invitation.secret.hex())
    assert stranger.stdout.readline() == "listens\n"
    with pytest.raises(OSError, match=rf"^process {stranger.pid} of another user \({NOBODY}\) answers .* rank 0$"):
        HostLink(1, (0, 1)).connect(invitation)
    output, _ = stranger.communicate(timeout=LIMIT_S)
    assert (stranger.returncode, output) == (0, "got b''\n")
