"""Where the Python threads of this process are now, in the lines of the user's code. Local; any thread may call it."""

import linecache
import sys
import threading
import traceback

from .error_text import MOST_FRAMES, Frame, frames_of, is_users

_MOST_THREADS = 3


def where() -> str:
    """Return where the main thread is, and other threads that run code of the user, without the calling thread.

    Each thread has a heading and its last frames of the user's code, outermost first, as Python prints them; the main
    thread its last frame of all if none is the user's.
    """
    names = {thread.ident: f'thread "{thread.name}"' for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    parts = []
    # Tuples, since idents are numbers: the main thread comes first.
    for _, ident in sorted((ident != main, ident) for ident in frames):
        every = frames_of(traceback.extract_stack(frames[ident]))
        shown = _users(every) or (every[-1:] if ident == main else [])
        if shown:
            heading = "in the main thread:" if ident == main else f"in {names.get(ident, 'a thread of a library')}:"
            parts.append("\n".join([heading, *map(str, shown)]))
    return "\n".join(parts[:_MOST_THREADS])


def main_line() -> str:
    """Return the line of the user's code in which the main thread is, or "" if there is none."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else _users(frames_of(traceback.extract_stack(frame)))
    if not frames:
        return ""
    file, line, name = frames[-1]
    return f'at "{file}", line {line}, in {name}: {linecache.getline(file, line).strip()}'


def _users(frames: list[Frame]) -> list[Frame]:
    return [each for each in frames if is_users(each.file)][-MOST_FRAMES:]
