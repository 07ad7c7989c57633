"""What a process of another user of this machine does to a job: it writes to whatever socket of it has a name.

Run as a program, by root, it becomes that other user before it does anything, and says in the end what was taken.
"""

import array
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

NOBODY = 65534
OURS = "mpistrat"

needs_another_user = pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0,
                                        reason="only root can start a process of another user")


def become_nobody() -> None:
    """Make this process one of another user, without any capability."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def names_of(*processes: int) -> list[str]:
    """The names that sockets of mpistrat in these processes have now. Every user can read names, though not of whom."""
    inodes = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # what has just looked into the folder
                inodes.add(str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        inode, *name = line.split()[6:]
        if inode in inodes and name and OURS in name[0]:
            found.add(name[0])
    return sorted(found)


def attack(name: str) -> Counter[str]:
    """Send what might do harm to the socket of that name. What was taken, by kind."""
    taken: Counter[str] = Counter()
    address = "\0" + name[1:] if name.startswith("@") else name
    for what in _datagrams():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(what, address)
            taken["datagram"] += 1
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, _memory() as memory:
        sender.setblocking(False)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [memory]))
        sender.sendmsg([b"\0"], [rights], 0, address)
        taken["descriptor"] += 1
    return taken


def _datagrams() -> list[bytes]:
    return [b"", b"\0", b"\1", b"\2", b"\0" * 9, os.urandom(100), os.urandom(32_000)]


@contextlib.contextmanager
def _memory() -> Iterator[int]:
    descriptor = os.memfd_create("stranger")
    try:
        os.write(descriptor, os.urandom(2**16))
        yield descriptor
    finally:
        os.close(descriptor)


def start(seconds: float, names: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a stranger that attacks these names for so long. It prints "ready" first."""
    return subprocess.Popen([sys.executable, "-m", "tests.support.strangers", str(seconds), *names],
                            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def main(seconds: float, names: Sequence[str]) -> None:
    become_nobody()
    print("ready", flush=True)
    taken: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name in names:
            taken += attack(name)
    print(f"attacked {len(names)} names; taken: {', '.join(sorted(taken)) or 'nothing'}")


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
