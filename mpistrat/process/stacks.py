"""The current stacks of the Python threads of a process, in lines of the user's code. Local; for any thread.

Another process of this host may be unable to report its stacks, because one of its threads holds the interpreter lock.
In this case py-spy reads the stacks from outside, if py-spy is installed.
"""

import faulthandler
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from ..core.install import pip
from .error_text import MOST_FRAMES, Frame, is_users
from .procfs import Process

_MOST_THREADS = 3
# What faulthandler writes.
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_COLLECTING = "Python's garbage collector runs in one of its threads, and waits for the destructor of an object."
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_PY_SPY_LIMIT_S = 3.0  # py-spy takes 0.03 s, unless the process is stopped.


def where() -> str:
    """Return where the main thread is, and other threads that run code of the user.

    Each thread has a heading and its last frames of the user's code, outermost first, in Python's format. The main
    thread has its very last frame if no frame is of the user's code.
    """
    names = {thread.ident: f'thread "{thread.name}"' for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks, is_collecting = _stacks()
    # Tuples, since idents are numbers: the main thread comes first.
    text = _text_of([("" if ident == main else names.get(ident, "a thread of a library"), frames)
                     for _, ident, frames in sorted((ident != main, ident, frames) for ident, frames in stacks)])
    return f"{text}\n{_COLLECTING}" if is_collecting else text


def main_line() -> str:
    """Return the line of the user's code in which the main thread is, or "" if it is in no such code."""
    main = threading.main_thread().ident
    frames = [frame for ident, frames in _stacks()[0] if ident == main for frame in _users(frames)]
    if not frames:
        return ""
    file, line, name = frames[-1]
    return f'at "{file}", line {line}, in {name}: {linecache.getline(file, line).strip()}'


def _stacks() -> tuple[list[tuple[int, list[Frame]]], bool]:
    """Return the threads of Python with their frames, and whether Python's garbage collector runs.

    Frames are outermost first, at most 100 per thread. A running collector waits in a destructor, in another thread.

    Uses faulthandler, which makes no objects. Walking the frames of sys._current_frames() has crashed Python 3.11.7
    (see https://github.com/python/cpython/issues/99110). Most likely the creation of a frame object ran the garbage
    collector, whose finalizers let the thread of this frame continue.
    """
    with open(os.memfd_create("mpistrat-stacks"), "w+b") as file:  # not a pipe, which may be full
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode("ascii", errors="replace")
    stacks: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stacks.append((int(thread[1], 16), []))
        elif stacks and (frame := _FRAME.match(line)):
            stacks[-1][1].insert(0, Frame(_decoded(frame[1]), int(frame[2]), _decoded(frame[3])))
    return stacks, "\n  Garbage-collecting\n" in text


def _decoded(text: str) -> str:
    """The text with faulthandler's escape sequences replaced by their characters."""
    return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)


def look(processes: Mapping[int, Process], rank: int) -> str:
    """Return where a rank is, or how to find out, as text that begins a new line. Takes up to 3 s.

    `processes`: The processes of the other ranks of this host.
    """
    if rank not in processes:
        return f'\n"py-spy dump --pid PID" on its host shows where rank {rank} is.'
    pid = processes[rank].pid
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return f'\n"py-spy dump --pid {pid}" shows where rank {rank} is, if you install it ({pip("py-spy")}).'
    try:
        done = subprocess.run([program, "dump", "--json", "--pid", str(pid)], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=_PY_SPY_LIMIT_S, check=False)
        if done.returncode == 0:
            return f"\nRank {rank} is here, as py-spy sees it, {_seen(done.stdout)}"
        problem = done.stderr.decode(errors="replace").strip().partition("\n")[0] or f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"no answer in {_PY_SPY_LIMIT_S:g} s"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = repr(error)
    return f'\n"py-spy dump --pid {pid}" does not show where rank {rank} is: {problem}'


def _seen(output: bytes) -> str:
    """The stacks in the output of `py-spy dump --json`. Raises ValueError, KeyError, TypeError: The output is other."""
    threads = []
    found = json.loads(output)
    if not isinstance(found, list):
        raise TypeError(f"py-spy must print a list of threads. Received: {type(found).__name__}")
    for thread in found:
        frames = [Frame(each["filename"], each["line"], each["name"]) for each in reversed(thread["frames"])]
        threads.append(("" if thread["os_thread_id"] == thread["pid"] else f'thread "{thread["thread_name"]}"', frames))
    return _text_of(sorted(threads, key=lambda each: each[0] != ""))


def _text_of(threads: Iterable[tuple[str, list[Frame]]]) -> str:
    """The text of `where` on some threads.

    `threads`: The threads in order, as (name, frames outermost first). The name is "" for the main thread.
    """
    parts = []
    for name, every in threads:
        shown = _users(every) or (every[-1:] if not name else [])
        if shown:
            parts.append("\n".join([f"in {name or 'the main thread'}:", *map(str, shown)]))
    return "\n".join(parts[:_MOST_THREADS])


def _users(frames: list[Frame]) -> list[Frame]:
    return [each for each in frames if is_users(each.file)][-MOST_FRAMES:]
