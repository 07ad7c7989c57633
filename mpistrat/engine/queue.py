"""The queue between the threads that submit operations and the thread that executes them."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from ..core.errors import DuplicateNameError, EngineError
from ..core.handle import Entry, Origin


class _Here(threading.local):
    """Has a unique object for each thread. Thread ids are not unique, because Python reuses ids of ended threads."""

    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


class TensorQueue:
    """Entries that were submitted and are not finished, by name. Thread-safe.

    For each name, the queue counts the failed executions of graphs that submit the name. A request contains this count.
    So if an execution fails on all ranks after only one rank has submitted the name, the leftover entry of that rank
    does not match entries of a later execution, which have a higher count. A count is forgotten when no rank can have
    leftover entries: the ranks execute the name, or the graph's thread has waited for a collective outside of graphs.
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

        If an entry with the same name is in flight, the new entry waits behind it. This is allowed for different nodes
        of graphs that run in program order, because each entry then matches the entry of the same node on other ranks.
        It is not allowed for one node: the node then runs in two concurrent executions, whose order is random.

        Returns True if the caller drives the engine (`is_driver`) and there is no other new entry. The caller must then
        count the entry as outstanding, because `take_new` does not return it.

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
                        "that is currently being processed. Wait for the first request, or pass another name=."
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
        """Count a failed execution of a graph that submits `names`. None of its operations is in flight any more."""
        with self._lock:
            self.failures.update(names)
            self._failed_in.update(dict.fromkeys(names, _here.thread))

    def forget_failures(self, of_all_threads: bool = False) -> None:
        """Forget the failures of this thread, or of all threads. No rank may have entries left of failed executions."""
        with self._lock:
            for name in [name for name, its in self._failed_in.items() if of_all_threads or its is _here.thread]:
                self._forget(name, self.failures[name])

    def _forget(self, name: str, failures: int) -> None:
        self.failures[name] -= failures
        if self.failures[name] <= 0:  # Below 0 if a join() came between the failure and this call.
            del self.failures[name], self._failed_in[name]

    def put_later(self, entry: Entry) -> None:
        """Let the driver `put` the entry later. Raises only the error of a closed queue. The handle gets other errors.

        Used in threads that a signal handler may interrupt, because it takes no lock. If a handler interrupted `put`
        and waited for a collective, the driver would wait for the lock of `put`, and the handler for the driver.
        """
        self.later.append(entry)
        if self._closed_by is not None:
            raise self._closed_by

    def take_new(self) -> list[Entry]:
        """Return the entries put since the last call, in order. They stay in flight. Driver only."""
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
        """Remove the entry in flight with this name, and return it. The name is then free again. Driver only.

        Called before the entry's handle is completed. An entry that waits behind it becomes new (`take_new`). Until
        `executed` is called, `close` still returns the finished entry, so that a failure in between does not lose it.

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
        """Forget the entries that `finish` returned: they are complete, or the device completes them. Driver only."""
        self._executing.clear()

    def refuse(self, error: Exception) -> None:
        """Refuse later entries with `error`. Any thread may call it; takes no lock. The driver calls `close` later."""
        self._closed_by = self._closed_by or error

    def disable_after_fork(self, error: Exception) -> None:
        """In a forked process, refuse entries with `error`, and drop those in flight, which belong to the parent."""
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
