"""The files of a timeline, in Chrome's trace format, which https://ui.perfetto.dev reads, also while one is written.

A file has groups of tracks. The spans of a track do not overlap. A span may have parts.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Values = Mapping[str, int | str]
Part = tuple[str, int, int]  # name, begin, end
OPERATION = "operation"  # the category of the spans that `spans_in` returns
PLACE = "place"  # the category of the marks that `places_in` returns

_PAGE_BYTES = 4096
_CLOSE = b"\n]"


def spans_in(path: str) -> tuple[list[tuple[str, int, Values]], bool]:
    """Return the operations in a file, which may be truncated.

    Returns:
        (name, begin, values) of each operation, and whether the end of the file is missing.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not a timeline.
    """
    events, is_cut = _events(Path(path).read_bytes())
    try:
        spans = [(event["name"], round(event["ts"] * 1000), event["args"]) for event in events
                 if event.get("cat") == OPERATION]
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"the file was not written by mpistrat: {error!r}.") from error
    if not spans:
        raise ValueError(f"{path} has no operation of mpistrat. The file is empty, or was not written by mpistrat.")
    return spans, is_cut


def places_in(path: str) -> list[tuple[int, int, str]]:
    """Return where in the script each rank was in each second, as (rank, nanoseconds, place). `path`: A timeline."""
    return [(event["pid"], round(event["ts"] * 1000), event["name"]) for event in _events(Path(path).read_bytes())[0]
            if event.get("cat") == PLACE]


class TraceFile:
    """A trace file that is being written. Added events are in the file after `flush`. Times are nanoseconds.

    The file is a JSON array of events, one per line. Each write replaces the closing bracket and adds a new bracket.

    Raises:
        OSError: The file cannot be created or written. Every method may raise this error.
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._end = 0
        self._events: list[bytes] = []
        try:
            self._put(b"[" + _CLOSE)
        except OSError as error:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise OSError(error.errno, error.strerror, path) from None

    def track(self, group: int, group_name: str, track: int, name: str) -> None:
        """Add a track and its name. To be called before the first span of the track."""
        for kind, values in (("process_name", {"name": group_name}), ("process_sort_index", {"sort_index": group}),
                             ("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": track})):
            self._add({"name": kind, "ph": "M", "pid": group, "tid": track, "args": values})

    def span(self, group: int, track: int, category: str, part: Part, values: Values,
             parts: Iterable[Part] = ()) -> None:
        """Add a span with its parts, which must be in the order of time."""
        for name, begin, end in (part, *parts):
            self._add({"name": name, "cat": category, "ph": "X", "pid": group, "tid": track, "ts": begin / 1000,
                       "dur": (end - begin) / 1000, "args": values})
            category, values = "phase", {}

    def mark(self, group: int, track: int, name: str, at: int, category: str = "") -> None:
        """Add a mark at the time `at`."""
        self._add({"name": name, "cat": category, "ph": "i", "s": "t", "pid": group, "tid": track, "ts": at / 1000})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(json.dumps(event, separators=(",", ":")).encode())

    def flush(self) -> None:
        """Write the added events."""
        events, self._events = self._events, []
        block: list[bytes] = []
        size = 0
        for event in events:
            # A signal that ends the process can cut a write between two pages.
            if block and size + len(event) > _PAGE_BYTES:
                self._put(b",\n".join(block) + _CLOSE)
                block, size = [], 0
            block.append(event)
            size += len(event) + 2
        if block:
            self._put(b",\n".join(block) + _CLOSE)

    def _put(self, data: bytes) -> None:
        data = (b"" if self._end == 0 else b"\n" if self._end == 1 else b",\n") + data
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._file, data[done:], self._end + done)
        except OSError:
            # The disk is full. The bracket overwrites part of the written data, which needs no further space.
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _CLOSE, self._end)
            raise
        self._end += len(data) - len(_CLOSE)

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _events(data: bytes) -> tuple[list[dict[str, Any]], bool]:
    """The events in the data of a file, and whether the end of the file is missing."""
    is_cut = False
    try:
        found = json.loads(data)
        events = found.get("traceEvents") if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        is_cut, events = True, []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                events.append(json.loads(line.strip().rstrip(b",")))
    return [event for event in events if isinstance(event, dict)] if isinstance(events, list) else [], is_cut
