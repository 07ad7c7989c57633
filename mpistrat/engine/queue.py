"""Hand-over between the caller's threads and the engine's: Handle, Entry and TensorQueue."""

import logging
import threading
from collections import deque

from ..core.errors import DuplicateNameError
from ..core.handle import Entry

logger = logging.getLogger(__name__)















class TensorQueue:
    """Entries that were submitted and are not yet complete, by name. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: deque[Entry] = deque()
        self._in_flight: dict[str, Entry] = {}
        self._closed_by: Exception | None = None

    def put(self, entry: Entry, is_taken: bool = False) -> bool:
        """Add an entry.

        Args:
            entry: The entry.
            is_taken: If no other entry is new, this one is not either: the caller has taken it.

        Returns:
            Whether the caller has taken it.

        Raises:
            DuplicateNameError: One of this name is in flight.
            Exception: The error that the queue was closed with.
        """
        name = entry.request.name
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by
            if name in self._in_flight:
                raise DuplicateNameError(
                    f"{name}: requested to reduce, gather or broadcast a tensor with the same name as another one that "
                    f"is currently being processed. Wait for the first, or give it another name=.")
            self._in_flight[name] = entry
            if is_taken and not self._new:
                return True
            self._new.append(entry)
            return False

    def take_new(self) -> list[Entry]:
        """The entries put since the last call, in order. They stay in flight."""
        if not self._new:
            return []  # What is being put right now is announced to the driver once it is there.
        with self._lock:
            entries = list(self._new)
            self._new.clear()
        return entries

    def finish(self, name: str) -> Entry | None:
        """Take an entry out of flight, before its handle is completed, so that its name may be used again."""
        with self._lock:
            return self._in_flight.pop(name, None)

    def disown(self, error: Exception) -> None:
        """In a forked process: refuse all entries with `error`. What is in flight is the parent's."""
        self._lock = threading.Lock()  # Another thread may have held the old one, which is not there.
        self._closed_by = error
        self._in_flight.clear()
        self._new.clear()

    def close(self, error: Exception) -> list[Entry]:
        """Refuse later entries with `error`, and take out all that are in flight."""
        with self._lock:
            if self._closed_by is None:
                self._closed_by = error
            entries = list(self._in_flight.values())
            self._in_flight.clear()
            self._new.clear()
        return entries
