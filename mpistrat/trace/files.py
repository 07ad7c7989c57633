"""The files of a timeline: Chrome's trace format (.json) and Perfetto's (.pftrace). Each can be read at every moment.

A file has groups of lanes. The spans of a lane do not overlap, but a span may have parts.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import MissingDependencyError
from ..core.install import pip_extra

Values = Mapping[str, int | str]
Part = tuple[str, int, int]  # name, begin, end
OPERATION = "operation"  # the category of the spans that `spans_in` returns

_PAGE_BYTES = 4096
_CLOSE = b"\n]"
_PACKET = b"\n"  # Field 1 of Perfetto's Trace, a packet, whose length follows as a varint.
_JSON = re.compile(rb'\s*(?:\[\s*[{\]]|\{\s*["}])')  # May begin with an empty line, and so as a packet does.


class TraceFile(Protocol):
    """A file that is being written. What is added is in the file after `flush`. Times are nanoseconds.

    All methods raise OSError if the file cannot be written.
    """

    def lane(self, group: int, group_name: str, lane: int, name: str) -> None:
        """Name a lane, before its first span."""

    def span(self, group: int, lane: int, category: str, part: Part, values: Values,
             parts: Iterable[Part] = ()) -> None:
        """Add a span with its parts, which are in order."""

    def mark(self, group: int, lane: int, name: str, at: int) -> None:
        """Add a moment."""

    def flush(self) -> None:
        """Write what was added."""

    def close(self) -> None:
        """Close the file. May be called twice."""


def create(path: str) -> TraceFile:
    """Create a file, whose ending selects the format.

    Raises:
        OSError: It cannot be created.
        MissingDependencyError: The format needs a package that is not installed.
        ValueError: The ending is that of no format.
    """
    if path.endswith(".json"):
        return _ChromeFile(path)
    if path.endswith(".pftrace"):
        return _PerfettoFile(path)
    raise ValueError(f"{path}: a timeline ends in .json (Chrome's trace format) or .pftrace (Perfetto's).")


def spans_in(path: str) -> tuple[list[tuple[str, int, Values]], bool]:
    """The operations in a file, also in one that was cut.

    Returns:
        (name, begin, values) of each, and whether the end of the file is missing.

    Raises:
        OSError: It cannot be read.
        MissingDependencyError: As `create`.
        ValueError: It is not a timeline.
    """
    data = Path(path).read_bytes()
    spans, is_cut = _chrome_spans(data) if _JSON.match(data) or not data.startswith(_PACKET) \
        else _perfetto_spans(data)
    if not spans:
        raise ValueError(f"{path} has no operation of mpistrat. It is empty, or not written by mpistrat.")
    return spans, is_cut


class _ChromeFile:
    """An array of events, one per line. Each write replaces the closing bracket, and ends in a new one."""

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

    def lane(self, group: int, group_name: str, lane: int, name: str) -> None:
        for kind, values in (("process_name", {"name": group_name}), ("process_sort_index", {"sort_index": group}),
                             ("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": lane})):
            self._add({"name": kind, "ph": "M", "pid": group, "tid": lane, "args": values})

    def span(self, group: int, lane: int, category: str, part: Part, values: Values,
             parts: Iterable[Part] = ()) -> None:
        for name, begin, end in (part, *parts):
            self._add({"name": name, "cat": category, "ph": "X", "pid": group, "tid": lane, "ts": begin / 1000,
                       "dur": (end - begin) / 1000, "args": values})
            category, values = "phase", {}

    def mark(self, group: int, lane: int, name: str, at: int) -> None:
        self._add({"name": name, "ph": "i", "s": "t", "pid": group, "tid": lane, "ts": at / 1000})

    def _add(self, event: dict[str, Any]) -> None:
        self._events.append(json.dumps(event, separators=(",", ":")).encode())

    def flush(self) -> None:
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
            # The disk is full. The bracket overwrites what was written, which needs no room.
            os.ftruncate(self._file, self._end)
            os.pwrite(self._file, _CLOSE, self._end)
            raise
        self._end += len(data) - len(_CLOSE)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _chrome_spans(data: bytes) -> tuple[list[tuple[str, int, Values]], bool]:
    is_cut = False
    try:
        found = json.loads(data)
        events = found.get("traceEvents") if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        is_cut, events = True, []
        for line in data.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                events.append(json.loads(line.strip().rstrip(b",")))
    try:
        return [(event["name"], round(event["ts"] * 1000), event["args"]) for event in events or ()
                if isinstance(event, dict) and event.get("cat") == OPERATION], is_cut
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"it is not written by mpistrat: {error!r}.") from error


def _perfetto() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise MissingDependencyError(f"a timeline in Perfetto's format needs perfetto ({pip_extra('timeline')}). A "
                                     "name that ends in .json needs no package.") from error
    return perfetto_trace_pb2


class _PerfettoFile:
    """Packets of TrackEvent. Each has its length, so a file that ends in the middle of one can be read up to it."""

    _SEQUENCE = 1

    def __init__(self, path: str):
        self._protos = _perfetto()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - `close` closes it
        self._packets: list[bytes] = []
        self._groups: set[int] = set()

    def lane(self, group: int, group_name: str, lane: int, name: str) -> None:
        if group not in self._groups:
            self._groups.add(group)
            packet = self._protos.TracePacket()
            packet.track_descriptor.uuid = _uuid(group)
            packet.track_descriptor.name = group_name
            packet.track_descriptor.sibling_order_rank = group
            packet.track_descriptor.child_ordering = self._protos.TrackDescriptor.EXPLICIT
            self._add(packet)
        packet = self._protos.TracePacket()
        descriptor = packet.track_descriptor
        descriptor.uuid, descriptor.parent_uuid, descriptor.name = _uuid(group, lane), _uuid(group), name
        descriptor.sibling_order_rank = lane
        self._add(packet)

    def span(self, group: int, lane: int, category: str, part: Part, values: Values,
             parts: Iterable[Part] = ()) -> None:
        name, begin, end = part
        packet = self._event(group, lane, begin, self._protos.TrackEvent.TYPE_SLICE_BEGIN, name)
        packet.track_event.categories.append(category)
        for key, value in values.items():
            annotation = packet.track_event.debug_annotations.add()
            annotation.name = key
            if isinstance(value, int):
                annotation.int_value = value
            else:
                annotation.string_value = value
        self._add(packet)
        for name, first, last in parts:
            self._add(self._event(group, lane, first, self._protos.TrackEvent.TYPE_SLICE_BEGIN, name))
            self._add(self._event(group, lane, last, self._protos.TrackEvent.TYPE_SLICE_END))
        self._add(self._event(group, lane, end, self._protos.TrackEvent.TYPE_SLICE_END))

    def mark(self, group: int, lane: int, name: str, at: int) -> None:
        self._add(self._event(group, lane, at, self._protos.TrackEvent.TYPE_INSTANT, name))

    def _event(self, group: int, lane: int, at: int, kind: int, name: str = "") -> Any:
        packet = self._protos.TracePacket()
        packet.timestamp, packet.trusted_packet_sequence_id = at, self._SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, _uuid(group, lane)
        if name:
            packet.track_event.name = name
        return packet

    def _add(self, packet: Any) -> None:
        self._packets.append(self._protos.Trace(packet=[packet]).SerializeToString())

    def flush(self) -> None:
        data, self._packets = b"".join(self._packets), []
        while data:
            data = data[self._file.write(data):]

    def close(self) -> None:
        self._file.close()


def _uuid(group: int, lane: int = -1) -> int:
    """The number of the track of a group, or of one of its lanes; never 0."""
    return (group + 1 << 32) + lane + 1


def _perfetto_spans(data: bytes) -> tuple[list[tuple[str, int, Values]], bool]:
    protos = _perfetto()
    spans: list[tuple[str, int, Values]] = []
    place = 0
    while place < len(data):
        begin, end = _packet(data, place)
        if end > len(data):
            return spans, True
        try:
            packet = protos.TracePacket.FromString(data[begin:end])
        except Exception as error:  # protobuf's DecodeError is another class in each of its implementations.
            raise ValueError(f"it has no packet of Perfetto at byte {place}: {error}") from error
        if OPERATION in packet.track_event.categories:
            spans.append((packet.track_event.name, packet.timestamp, {
                each.name: each.int_value if each.WhichOneof("value") == "int_value" else each.string_value
                for each in packet.track_event.debug_annotations}))
        place = end
    return spans, False


def _packet(data: bytes, place: int) -> tuple[int, int]:
    """Where the packet at `place` begins and ends. It ends behind the data if that is cut.

    Raises ValueError: There is none.
    """
    if not data.startswith(_PACKET, place):
        raise ValueError(f"it has no packet of Perfetto at byte {place}.")
    size = shift = 0
    for at, byte in enumerate(data[place + 1:place + 11], place + 2):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return at, at + size
    return len(data), len(data) + 1
