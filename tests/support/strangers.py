"""What a process of another user of this machine does to a job: it opens whatever the job's processes have open.

Run as a program, by root, it becomes that other user before it does anything, and says in the end what it got.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

NOBODY = 65534

needs_another_user = pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0,
                                        reason="only root can start a process of another user")


def become_nobody() -> None:
    """Make this process one of another user, without any capability."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def attack(process: int, descriptors: int) -> int:
    """Write what might do harm to what the process may have open. How often that was possible."""
    written = 0
    for descriptor in range(descriptors):
        with contextlib.suppress(OSError), open(f"/proc/{process}/fd/{descriptor}", "wb", buffering=0,
                                                opener=lambda path, flags: os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                                                ) as file:
            file.write(os.urandom(100))
            written += 1
    return written


def start(seconds: float, processes: Sequence[int]) -> "subprocess.Popen[str]":
    """Start a stranger that attacks these processes for so long. It prints "ready" first."""
    return subprocess.Popen([sys.executable, "-m", "tests.support.strangers", str(seconds), *map(str, processes)],
                            stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def main(seconds: float, processes: Sequence[int]) -> None:
    """Attack for so long."""
    become_nobody()
    print("ready", flush=True)
    written = 0
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for process in processes:
            written += attack(process, 100)
    print(f"attacked {len(processes)} processes; written {written} times")


if __name__ == "__main__":
    main(float(sys.argv[1]), list(map(int, sys.argv[2:])))
