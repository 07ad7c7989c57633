"""The text that people see of an uncaught exception, or of a process that waits: the last frames of the user's code.

TensorFlow, Keras and AutoGraph put stack frames into the message of an exception. So a message of one line becomes a
hundred lines. This module removes the frames from the message, and shows only the frames of the user's code. It is used
by the rank that fails, and by the summary of `mpistrat run`.
"""

import faulthandler
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ..core.install import pip
from .procfs import Process

_MOST_FRAMES = 3
_MOST_CAUSES = 2
OWN_ERRORS = "mpistrat.core.errors."

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# A frame in a text. AutoGraph marks converted frames with a star.
_FRAME = re.compile(r'(?P<indent> *)File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+?)(?: +\*)?$')
_NODE = re.compile(r"\s*(?P<node>\[\[.*\]\])(?: \[Op:\S*\])?$")
_STACK = "Traceback (most recent call last):"
_HEADINGS = re.compile(r"(?:Graph execution error:|in user code:|<stack traces unavailable>|"
                       r"Detected at node .* defined at \(most recent call last\):)$")
_BEGINS_WITH_CLASS = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning): ")
NO_HOROVOD = "No module named 'horovod"
# Advice on errors caused by several ranks, a strategy or names of Horovod, by a part of the error's text.
ADVICE = {"cache lockfile already exists": "Ranks cannot share a cache file. Give each its own: dataset.cache("
          'f"{path}-{mpistrat.rank()}"). Or a job that was killed has left the lockfile: delete it.',
          "allow_missing_files was set to false": "Ranks cannot write a checkpoint or a SavedModel to one path at the "
          "same time: save it under `if mpistrat.rank() == 0:`.",
          **dict.fromkeys(("values.PerReplica'>", "is not available outside the replica context"), "A step of a "
                          "strategy runs in a replica: write strategy.run(step, args=(batch,)), not step(batch)."),
          "must be either `tf.data.AUTOTUNE`": "cycle_length is by default the number of the rank's own cores: write "
          "cycle_length=... or num_parallel_calls=tf.data.AUTOTUNE. With MPISTRAT_BIND=none a rank has all cores.",
          NO_HOROVOD: "Write `import mpistrat.keras as hvd` in place of `import horovod.keras as hvd`, "
          "and likewise for horovod.tensorflow. A program that you cannot edit: mpistrat run --as-horovod -np 2 ..."}
_OUTSIDE = tuple(os.path.join(path, "") for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"),
                                                     os.path.dirname(os.path.dirname(os.path.abspath(__file__)))})


class Frame(NamedTuple):
    file: str
    line: int
    name: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        text = f'  File "{self.file}", line {self.line}, in {self.name}'
        return f"{text}\n    {source}" if source else text


@dataclass(frozen=True)
class ErrorText:
    frames: str  # The last frames of the user's code, outermost first, as Python prints them.
    message: str  # The whole message, with the class of the exception in front, and without stacks of frameworks.

    def __str__(self) -> str:
        return f"{self.frames}\n{self.message}" if self.frames else self.message


def describe(error: BaseException, trace: TracebackType | None) -> ErrorText:
    every = [Frame(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(trace)
             if (each.filename, each.name) != ("<string>", "__init__")]  # Not the generated method of a dataclass.
    frames = [frame for frame in every if is_users(frame.file)]
    inner, message = split_message(error)
    frames += [frame for frame in inner if is_users(frame.file) and frame not in frames]
    # A program of a library, such as python -m pytest, has no frame of the user.
    shown = (frames or every)[-_MOST_FRAMES:]
    advice = [line for part, line in ADVICE.items() if part in message]
    if isinstance(error, ModuleNotFoundError):
        advice.append(f"(The Python of this rank is {sys.executable}.)")
    return ErrorText("\n".join(map(str, shown)), "\n".join([message, *advice, *_causes(error)]))


def is_users(file: str) -> bool:
    """Return whether a source file is the user's own, and not of an installed package, Python or mpistrat."""
    parts = file.split(os.sep)
    # Frames of compiled Cython have paths in the sources of their package, such as h5py/_objects.pyx.
    return not (file.startswith(("<frozen ", *_OUTSIDE)) or "site-packages" in parts or "dist-packages" in parts
                or parts[-1].startswith("__autograph_generated_file") or file.endswith((".pyx", ".pxd", ".pxi")))


def split_message(error: BaseException) -> tuple[list[Frame], str]:
    """Return the stack frames in the message of an exception, and the message without them, with the class in front.

    Only messages of TensorFlow and AutoGraph are split. If they contain an error of mpistrat, only that error is kept.
    """
    text = _ANSI.sub("", "".join(traceback.format_exception_only(error)).rstrip())
    head, colon, rest = text.partition(": ")
    if not colon or not rest.startswith(("Graph execution error:", "in user code:")):
        return [], text
    lines = rest.splitlines()
    own = next((i for i, line in enumerate(lines) if line.startswith(OWN_ERRORS)), None)
    if own is not None:
        end = next((i for i in range(own, len(lines)) if _NODE.match(lines[i])), len(lines))
        # The error stays unchanged: it may have frames of other ranks. TensorFlow repeats it before the stack.
        report = "\n".join(lines[own:end]).rstrip()
        before = "\n".join(lines[:own]).replace(report.removeprefix(OWN_ERRORS), "")
        return (_without_frames(before.splitlines())[0],
                "\n".join(_without_node([report, *filter(_NODE.match, lines[end:])])))
    frames, lines = _without_frames(lines)
    message = "\n".join(_without_node(lines))
    return frames, message if _BEGINS_WITH_CLASS.match(message) else f"{head}: {message}"


def _without_frames(lines: Iterable[str]) -> tuple[list[Frame], list[str]]:
    """Return the frames in `lines`, and `lines` without frames, their source lines, headings and empty lines."""
    frames: list[Frame] = []
    message: list[str] = []
    block: list[str] = []  # the lines between two stacks
    indent = None  # of the frame whose source lines may follow
    for line in lines:
        if match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["name"]))
            indent = len(match["indent"])
        elif line.strip() == _STACK:
            message, block = _joined(message, block), []
        elif line.strip() and not _HEADINGS.match(line.strip()) and (
                indent is None or len(line) - len(line.lstrip(" ")) <= indent):
            indent = None
            block.append(line)
    return frames, textwrap.dedent("\n".join(_joined(message, block))).splitlines()


def _joined(message: list[str], block: list[str]) -> list[str]:
    """Append a block to a message. Return only the block if it repeats the message, as texts of TensorFlow do."""
    is_repeated = message and block and block[0].endswith(message[0]) and block[1:len(message)] == message[1:]
    return block if is_repeated else message + block


def _without_node(lines: list[str]) -> list[str]:
    """Remove all lines that name graph nodes, but keep one node that is not a Python call (PyFunc), if any."""
    found = [match["node"] for match in map(_NODE.match, lines) if match]
    named = [node for node in found if "{{node " in node and "PyFunc" not in node]
    return [*(line for line in lines if not _NODE.match(line)), *named[:1]]


def _causes(error: BaseException) -> list[str]:
    """Return a line for each cause of `error` (`__cause__`, or `__context__`), at most two. Omit repeated texts."""
    lines = []
    for _ in range(_MOST_CAUSES):
        how, cause = "caused by", error.__cause__
        if cause is None and not error.__suppress_context__:
            how, cause = "raised while handling", error.__context__
        if cause is None:
            break
        if str(cause) != str(error):
            lines.append(f"({how} {split_message(cause)[1].splitlines()[0]})")
        error = cause
    return lines


# -- the current stacks of the Python threads of a process -------------------------------------------------------------
# Local; for any thread. Another process of this host may be unable to report its stacks, because one of its threads
# holds the interpreter lock. In this case py-spy reads the stacks from outside, if py-spy is installed.

_MOST_THREADS = 3
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
_STACK_LINE = re.compile(r'  File "(.*)", line (\d+) in (.*)')  # as faulthandler writes it
_COLLECTING = "Python's garbage collector runs in a thread of this rank, and waits for the destructor of an object."
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")  # of faulthandler
_PY_SPY_LIMIT_S = 3.0  # py-spy takes 0.03 s, unless the process is stopped.


def where() -> str:
    """Return, as text, the last frames of the user's code in the main thread and in other threads that run it."""
    names = {thread.ident: f'thread "{thread.name}"' for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks, is_collecting = _stacks()
    # Tuples, since idents are numbers: the main thread comes first.
    text = _text_of([("" if ident == main else names.get(ident, "a thread of a library"), frames)
                     for _, ident, frames in sorted((ident != main, ident, frames) for ident, frames in stacks)])
    return f"{text}\n{_COLLECTING}" if is_collecting else text


def main_line() -> str:
    """Return, as text, the line of the user's code that the main thread executes; "" if it executes no such code.

    Called each second by mpistrat/trace. From Python 3.12 on this walks frame objects, whose creation no longer starts
    a garbage collection. It does not use faulthandler, which has crashed Python 3.13.0 when it read the state of a
    thread that was ending (https://github.com/python/cpython/issues/116008). Before Python 3.12 it uses `_stacks`.
    """
    main = threading.main_thread().ident
    if sys.version_info < (3, 12):
        stack = next((frames for ident, frames in _stacks()[0] if ident == main), [])
    else:
        innermost = sys._current_frames().get(main or 0)
        walked = islice(traceback.walk_stack(innermost), 100) if innermost else ()
        stack = [Frame(frame.f_code.co_filename, line or 0, frame.f_code.co_name) for frame, line in walked][::-1]
        del innermost, walked  # Otherwise the objects of a function that returns now may be destroyed in this thread.
    frames = _users(stack)
    if not frames:
        return ""
    file, line, name = frames[-1]
    return f'at "{file}", line {line}, in {name}: {linecache.getline(file, line).strip()}'


def _stacks() -> tuple[list[tuple[int, list[Frame]]], bool]:
    """Return (ident, frames) of each Python thread, and whether one of the threads runs the garbage collector.

    Frames are outermost first, at most 100 per thread. While this runs, a collector can only wait for a destructor.

    Uses faulthandler, which makes no objects. Walking the frames of sys._current_frames() has crashed Python 3.11.7
    (see https://github.com/python/cpython/issues/99110). Most likely, making a frame object started a garbage
    collection, and a finalizer then let the thread of this frame continue.
    """
    with open(os.memfd_create("mpistrat-stacks"), "w+b") as file:  # not a pipe, which may be full
        faulthandler.dump_traceback(file)
        file.seek(0)
        text = file.read().decode("ascii", errors="replace")

    def decoded(text: str) -> str:
        return _ESCAPE.sub(lambda match: chr(int(match[1] or match[2] or match[3], 16)), text)

    stacks: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            stacks.append((int(thread[1], 16), []))
        elif stacks and (frame := _STACK_LINE.match(line)):
            stacks[-1][1].insert(0, Frame(decoded(frame[1]), int(frame[2]), decoded(frame[3])))
    return stacks, "\n  Garbage-collecting\n" in text


def look(processes: Mapping[int, Process], rank: int) -> str:
    """Return which code a rank executes, or how to find out, as text that begins with a line break. Takes up to 3 s."""
    if rank not in processes:  # It is on another host.
        return f'\nTo see where rank {rank} is, run "py-spy dump --pid PID" on its host.'
    pid = processes[rank].pid
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        return f'\nTo see where rank {rank} is: {pip("py-spy")}, and then run "py-spy dump --pid {pid}".'
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
    """Return as text the stacks in the output of `py-spy dump --json`. Raises ValueError, KeyError, TypeError."""
    threads, found = [], json.loads(output)
    if not isinstance(found, list):
        raise TypeError(f"py-spy must print a list of threads. Received: {type(found).__name__}")
    for thread in found:
        frames = [Frame(each["filename"], each["line"], each["name"]) for each in reversed(thread["frames"])]
        threads.append(("" if thread["os_thread_id"] == thread["pid"] else f'thread "{thread["thread_name"]}"', frames))
    return _text_of(sorted(threads, key=lambda each: each[0] != ""))


def _text_of(threads: Iterable[tuple[str, list[Frame]]]) -> str:
    """Return a heading for each thread, and its last frames of the user's code, in the format of Python's tracebacks.

    `threads`: (name, frames) of each thread, in order; frames are outermost first. The main thread has the name "". If
    it has no frame of the user's code, its innermost frame is shown. Other threads without such a frame are left out.
    """
    parts = []
    for name, every in threads:
        shown = _users(every) or (every[-1:] if not name else [])
        if shown:
            parts.append("\n".join([f"in {name or 'the main thread'}:", *map(str, shown)]))
    return "\n".join(parts[:_MOST_THREADS])


def _users(frames: list[Frame]) -> list[Frame]:
    return [each for each in frames if is_users(each.file)][-_MOST_FRAMES:]
