"""Files without a name that one process has open and another one opens, and what a process of another user can do."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mpistrat.transport.open_file import OpenFile
from mpistrat.transport.pipes import PipeChannel
from mpistrat.transport.shm.memfd import map_file

from ..support.strangers import become_nobody, needs_another_user

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux's /proc only")


@pytest.fixture
def memory() -> Iterator[OpenFile]:
    """A file of shared memory that begins with 42. Nothing else may be left open."""
    before = os.listdir("/proc/self/fd")
    descriptor = os.memfd_create("mpistrat-test")
    map_file(descriptor, 1)[0] = 42
    yield OpenFile.of(descriptor)
    os.close(descriptor)
    assert os.listdir("/proc/self/fd") == before


def in_another_process(program: str, *files: OpenFile) -> str:
    """What a process prints that begins with this program, where `files` are known."""
    text = (f"import os\nfrom {OpenFile.__module__} import OpenFile\nfrom {map_file.__module__} import map_file\n"
            f"from {become_nobody.__module__} import become_nobody\nfiles = {list(files)}\n{program}")
    return subprocess.run([sys.executable, "-c", text], cwd=Path(__file__).parents[2], check=True, timeout=60,
                          stdout=subprocess.PIPE, text=True).stdout


def test_another_process_gets_the_same_memory(memory: OpenFile) -> None:
    printed = in_another_process("block = map_file(files[0].open(os.O_RDWR), 1)\nprint(block[0])\nblock[0] = 7", memory)
    assert printed == "42\n"
    with open(memory.open(os.O_RDWR), "rb") as same:
        assert same.read() == b"\7"
        assert not os.get_inheritable(same.fileno())


def test_a_file_that_another_process_has_under_the_number_is_not_opened(memory: OpenFile) -> None:
    for other in (replace(memory, inode=memory.inode + 1), replace(memory, device=memory.device + 1)):
        with pytest.raises(OSError, match=r"^it shows other processes than those of the job$"):
            other.open(os.O_RDWR)


def test_a_process_that_is_not_seen_is_an_error(memory: OpenFile) -> None:
    with pytest.raises(FileNotFoundError):
        replace(memory, process=2**22 + 1).open(os.O_RDWR)  # above the largest number of a process


TRIES = """
become_nobody()
for file in files:
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_NONBLOCK, os.O_RDWR):
        for way in (file.open, lambda flags: os.open(f"/proc/{file.process}/fd/{file.descriptor}", flags)):
            try:
                way(flags)
                print("opened")
            except PermissionError:
                print("refused")
"""


@needs_another_user
def test_another_user_that_knows_where_the_files_are_cannot_open_them(memory: OpenFile) -> None:
    channel = PipeChannel(0)
    assert in_another_process(TRIES, memory, channel.inbox).split() == ["refused"] * 12
    channel.close()
