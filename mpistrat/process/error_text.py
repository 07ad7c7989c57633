"""What to print of an uncaught exception: its whole message, and the last frames of the user's own code.

TensorFlow puts the stacks of a graph into the text of its exceptions, and Keras and AutoGraph put frames into the text.
So a message of one line is surrounded by a hundred lines. This module removes the frames from the text, and keeps the
frames of the user's code. All functions are pure, except that they look up lines of source files. Called by the rank
that fails, and by the summary of `mpistrat run`.
"""

import linecache
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

MOST_FRAMES = 3
MOST_CAUSES = 2
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
# Advice on errors caused by several ranks or by names of Horovod, by a part of the error's text.
ADVICE = {"cache lockfile already exists":
          'Ranks cannot share a cache file. Give each its own: dataset.cache(f"{path}-{mpistrat.rank()}"). Or a job '
          "that was killed has left the lockfile: delete it.",
          "allow_missing_files was set to false":
          "Ranks cannot write a checkpoint or a SavedModel to one path at the same time: save it under "
          "`if mpistrat.rank() == 0:`.",
          NO_HOROVOD: "Write `import mpistrat.keras as hvd` in place of `import horovod.keras as hvd`, "
          "and likewise for horovod.tensorflow. A program that you cannot edit: mpistrat run --as-horovod -np 2 ..."}
_OUTSIDE = tuple(os.path.join(path, "") for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"),
                                                     os.path.dirname(os.path.dirname(os.path.abspath(__file__)))})


class Frame(NamedTuple):
    """A place in a program."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        text = f'  File "{self.file}", line {self.line}, in {self.name}'
        return f"{text}\n    {source}" if source else text


@dataclass(frozen=True)
class ErrorText:
    """The text to print for an exception."""

    frames: str  # The last frames of the user's code, outermost first, as Python prints them.
    message: str  # The whole message, with the class of the exception in front, and without stacks of frameworks.

    def __str__(self) -> str:
        return f"{self.frames}\n{self.message}" if self.frames else self.message


def describe(error: BaseException, trace: TracebackType | None) -> ErrorText:
    """Return the text to print for an exception."""
    every = [Frame(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(trace)
             if (each.filename, each.name) != ("<string>", "__init__")]  # Not the generated method of a dataclass.
    frames = [frame for frame in every if is_users(frame.file)]
    inner, message = split_message(error)
    frames += [frame for frame in inner if is_users(frame.file) and frame not in frames]
    # A program of a library, such as python -m pytest, has no frame of the user.
    shown = (frames or every)[-MOST_FRAMES:]
    advice = [line for part, line in ADVICE.items() if part in message]
    if isinstance(error, ModuleNotFoundError):
        advice.append(f"(The Python of this rank is {sys.executable}.)")
    return ErrorText("\n".join(map(str, shown)), "\n".join([message, *advice, *_causes(error)]))


def is_users(file: str) -> bool:
    """Whether a source file is the user's, not a file of an installed package, of Python or of mpistrat."""
    parts = file.split(os.sep)
    # Frames of compiled Cython have paths in the sources of their package, such as h5py/_objects.pyx.
    return not (file.startswith(("<frozen ", *_OUTSIDE)) or "site-packages" in parts or "dist-packages" in parts
                or parts[-1].startswith("__autograph_generated_file") or file.endswith((".pyx", ".pxd", ".pxi")))


def split_message(error: BaseException) -> tuple[list[Frame], str]:
    """Remove the frames from the message of an exception. Returns the frames, and the message with the class in front.

    Only texts of TensorFlow and AutoGraph are changed. If such a text has an error of mpistrat, only this error stays.
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
    """Separate frames, their source lines, headings and empty lines from the other lines."""
    frames: list[Frame] = []
    message: list[str] = []
    block: list[str] = []  # the lines between two stacks
    indent = None  # of the frame whose source lines may follow
    for line in lines:
        match = _FRAME.match(line)
        if match:
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
    """Append a block, or return it alone if it repeats `message`: TensorFlow has some before and after the stack."""
    is_repeated = message and block and block[0].endswith(message[0]) and block[1:len(message)] == message[1:]
    return block if is_repeated else message + block


def _without_node(lines: list[str]) -> list[str]:
    """Keep only one line with a node of the graph, and none if all nodes are Python calls, whose names say nothing."""
    found = [match["node"] for match in map(_NODE.match, lines) if match]
    named = [node for node in found if "{{node " in node and "PyFunc" not in node]
    return [*(line for line in lines if not _NODE.match(line)), *named[:1]]


def _causes(error: BaseException) -> list[str]:
    """A line for each exception that `error` was raised from, or while handling, unless its text is that of `error`."""
    lines = []
    for _ in range(MOST_CAUSES):
        how, cause = "caused by", error.__cause__
        if cause is None and not error.__suppress_context__:
            how, cause = "raised while handling", error.__context__
        if cause is None:
            break
        if str(cause) != str(error):
            lines.append(f"({how} {split_message(cause)[1].splitlines()[0]})")
        error = cause
    return lines
