"""What the scripts of this directory share: lines that say which rank got what."""

import logging
import os
from collections.abc import Callable
from typing import Any


def launched_rank() -> int:
    """This process' rank, as the launcher says it; known before init(), and when init() fails."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)


def say(text: str) -> None:
    """Print `rank R: text` in one write, so that the lines of different ranks do not mix."""
    os.write(1, f"rank {launched_rank()}: {' | '.join(text.splitlines())}\n".encode())


def attempt(action: Callable[[], Any]) -> None:
    """Do something and say `ClassName: text` of the error that it raised, or what it returned."""
    try:
        result = action()
    except Exception as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say(f"returned {result}")


def descriptors() -> set[str]:
    """The open files, each with its number and what it is; that of the listing itself is closed again."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


class _Say(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname}: {record.getMessage()}")


def say_log() -> None:
    """Say mpistrat's log messages too, as `WARNING: text`, so that they come with the rank that logged them."""
    logging.getLogger("mpistrat").addHandler(_Say())
