"""The queue between the threads that submit operations and the thread that executes them."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from ..core.errors import DuplicateNameError, EngineError
from ..core.handle import Entry, Origin


class _Here(threading.local):
    """Has a unique object for each thread. Thread ids are not unique, since Python uses them again."""

    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


class TensorQueue:
    """Entries that were submitted and are not finished, by name. Thread-safe.

    For each name, the queue counts the executions of graphs that submit the name and have failed. The count is a part
    of the request. So if an execution fails on all ranks, and only one rank has submitted the name before, the leftover
    entry does not match an entry of a later execution. The count ends when the ranks next execute the name, or when the
    thread has waited for a collective outside of graphs, after which no rank has leftover entries.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # new, later: Entries that the driver has not taken.
        self.new: deque[Entry] = deque()
        self.later: deque[Entry] = deque()
        self._in_flight: dict[str, Entry] = {}
        # Entries of graphs that wait until the earlier entries with the same name are complete.
        self._behind: defaultdict[str, deque[Entry]] = defaultdict(deque)
        self._executing: list[Entry] = []
        # The number of failed executions that submit a name, by name. Names without failures are not in it.
        self.failures: Counter[str] = Counter()
        self._failed_in: dict[str, object] = {}  # By name, the thread that has called the graph.
        self._closed_by: Exception | None = None
        # For the thread that drives: the numbers of entries that it has taken and not finished, and finished.
        self.outstanding = self.completed = 0

    def put(self, entry: Entry, is_driver: bool = False) -> bool:
        """Add an entry.

        If an entry with the same name is in flight, the new entry may wait behind it. Both must come from different
        graph nodes that run in program order, so that each entry is matched with the same node's entry on other ranks.
        If one node has two entries in flight, the node runs in two concurrent executions, whose order is random.

        If the caller drives the engine (`is_driver`), and there is no other new entry, the caller takes the entry at
        once: it must count the entry as outstanding, and `take_new` does not return it. Returns whether it did.

        Raises DuplicateNameError: An entry with this name is in flight, and the new entry may not wait behind it. If
        the queue is closed, raises the error of `close`.
        """
        name = entry.request.name
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by
            first = self._in_flight.get(name)
            if first is not None:
                origins = [first.origin, *(each.origin for each in self._behind.get(name, ())), entry.origin]
                if len(set(origins)) < len(origins) or not all(each is not None and each.is_in_order
                                                               for each in origins):
                    raise DuplicateNameError(
                        f"{name}: requested to reduce, gather or broadcast a tensor with the same name as another one "
                        "that is currently being processed. Wait for the first, or give it another name=."
                        f"{_places(first.origin, entry.origin)}")
                self._behind[name].append(entry)
                return False
            if name in self.failures:
                self._note_failures(entry)
            self._in_flight[name] = entry
            if is_driver and not self.new:
                return True
            self.new.append(entry)
            return False

    def _note_failures(self, entry: Entry) -> None:
        entry.request = replace(entry.request, failures=self.failures[entry.request.name])

    def count_failure(self, names: Iterable[str]) -> None:
        """Count the failure of an execution that submits `names`, and that has nothing in flight any more."""
        with self._lock:
            self.failures.update(names)
            self._failed_in.update(dict.fromkeys(names, _here.thread))

    def forget_failures(self, of_all_threads: bool = False) -> None:
        """Forget failed executions of this thread, or of all threads, because all ranks have gone past them."""
        with self._lock:
            for name in [name for name, its in self._failed_in.items() if of_all_threads or its is _here.thread]:
                self._forget(name, self.failures[name])

    def _forget(self, name: str, failures: int) -> None:
        self.failures[name] -= failures
        if self.failures[name] <= 0:  # Below 0 if a join() came between the failure and this call.
            del self.failures[name], self._failed_in[name]

    def put_later(self, entry: Entry) -> None:
        """Let the driver `put` the entry later. Raises only the error of a closed queue. The handle gets other errors.

        For a thread that a signal handler may interrupt. A handler that interrupted `put`, and then waited for a
        collective, would make the driver wait for the lock. Here only atomic operations on deques are used.
        """
        self.later.append(entry)
        if self._closed_by is not None:
            raise self._closed_by

    def take_new(self) -> list[Entry]:
        """Return the entries put since the last call, in order. They stay in flight. For the thread that drives."""
        while self.later:
            entry = self.later.popleft()
            try:
                self.put(entry)
            except Exception as error:
                entry.handle.fail(error)
        if not self.new:
            return []  # An entry that another thread is just putting is followed by a wake-up.
        with self._lock:
            entries = list(self.new)
            self.new.clear()
        self.outstanding += len(entries)
        return entries

    def has(self, name: str) -> bool:
        with self._lock:
            return name in self._in_flight

    def in_flight(self) -> tuple[Entry, ...]:
        """Return the entries that are in flight, and the entries that wait behind an entry with the same name."""
        with self._lock:
            return (*self._in_flight.values(), *chain.from_iterable(self._behind.values()))

    def finish(self, name: str) -> Entry:
        """Take an entry out of flight, before its handle is completed, so that its name may be used again. Driver only.

        If another entry waits behind it, that entry becomes a new entry. Until `executed` is called, `close` still
        returns the entry, so that a failure in between does not lose it.

        Raises EngineError: No entry with this name is in flight.
        """
        with self._lock:
            entry = self._in_flight.pop(name, None)
            if entry is None:
                raise EngineError(f"{name}: the ranks have agreed on it, but it is not in flight on this rank. This is "
                                  "an error of mpistrat. Please report it.")
            self._executing.append(entry)
            if entry.request.failures and name in self._failed_in:
                self._forget(name, entry.request.failures)  # The count is the same on all ranks.
            if name in self._behind:
                following = self._behind[name].popleft()
                if name in self.failures:
                    self._note_failures(following)
                self._in_flight[name] = following
                self.new.append(following)
                if not self._behind[name]:
                    del self._behind[name]
        self.outstanding -= 1
        self.completed += 1
        return entry

    def executed(self) -> None:
        """Forget the entries of `finish`: their handles are complete, or the device will complete them. Driver only."""
        self._executing.clear()

    def refuse(self, error: Exception) -> None:
        """Refuse later entries with `error`. Any thread may call it; takes no lock. The driver calls `close` later."""
        self._closed_by = self._closed_by or error

    def disable_after_fork(self, error: Exception) -> None:
        """Refuse all entries with `error`, and drop those in flight, which belong to the parent of a forked process."""
        self._lock = threading.Lock()  # A thread that exists only in the parent process may hold the old lock.
        self._closed_by = error
        self._clear()

    def close(self, error: Exception) -> list[Entry]:
        """Refuse later entries with `error`. Remove and return all entries in flight or in execution. Driver only."""
        with self._lock:
            self.refuse(error)
            entries = [*self._executing, *self._in_flight.values(), *chain.from_iterable(self._behind.values()),
                       *self.later]
            self._clear()
        return entries

    def _clear(self) -> None:
        for entries in (self._in_flight, self._behind, self._executing, self.new, self.later):
            entries.clear()


def _places(*origins: Origin | None) -> str:
    """Return a sentence that says where two entries with one name come from; "" if neither comes from a graph."""
    first, second = (origin.place() if origin is not None else "a call outside of graphs" for origin in origins)
    return f" The first is submitted by {first}, the second by {second}." if any(origins) else ""
