"""The queue between the threads that submit operations and the thread that executes them."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from ..core.errors import DuplicateNameError, EngineError
from ..core.handle import Entry, Origin


class _Here(threading.local):
    """Stands for the thread that reads it. Numbers of threads are used again."""

    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


class TensorQueue:
    """Entries that were submitted and are not finished, by name. Thread-safe.

    It counts the executions of graphs that end in an error, for each name that they submit, until the ranks next
    execute that name, or the thread has waited for a collective outside of graphs: no rank comes to that with anything
    of a failed execution in flight. The count is a part of the request. So an entry that a failed execution has left on
    one rank does not meet an entry of a later execution on another rank, which has failed before it came to that name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # new, later: Entries that the driver has not taken.
        self.new: deque[Entry] = deque()
        self.later: deque[Entry] = deque()
        self._in_flight: dict[str, Entry] = {}
        # Entries of graphs that wait until the earlier ones of their names are complete.
        self._behind: defaultdict[str, deque[Entry]] = defaultdict(deque)
        self._executing: list[Entry] = []
        # How often executions that submit a name have failed, by name; names with none are not in it.
        self.failures: Counter[str] = Counter()
        self._failed_in: dict[str, object] = {}  # the thread that has called the graph
        self._closed_by: Exception | None = None
        # outstanding: How many entries the driver has taken and not finished. For the thread that drives.
        # completed: How many entries the driver has finished. For the thread that drives.
        self.outstanding = self.completed = 0

    def put(self, entry: Entry, is_driver: bool = False) -> bool:
        """Add an entry.

        If one of its name is in flight, it waits behind that one, provided that they come from different nodes of
        graphs which run in the order of the program: then each meets that of the same node on the other ranks. One node
        that has two in flight runs in two executions at the same time, whose order is random.

        Args:
            is_driver: The caller drives the engine, and takes the entry at once if no other one is new.

        Returns:
            Whether the caller has taken the entry, and is to count it as outstanding. `take_new` does not return it.

        Raises:
            DuplicateNameError: One of this name is in flight, and this one may not wait behind it.
            Exception: The error that the queue was closed with.
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
        """An execution that submits `names`, and of which nothing is in flight any more, has ended in an error."""
        with self._lock:
            self.failures.update(names)
            self._failed_in.update(dict.fromkeys(names, _here.thread))

    def forget_failures(self, of_all_threads: bool = False) -> None:
        """All ranks are past the executions that have failed, in this thread or in all threads."""
        with self._lock:
            for name in [name for name, its in self._failed_in.items() if of_all_threads or its is _here.thread]:
                self._forget(name, self.failures[name])

    def _forget(self, name: str, failures: int) -> None:
        self.failures[name] -= failures
        if self.failures[name] <= 0:  # Less: a join has come between the two.
            del self.failures[name], self._failed_in[name]

    def put_later(self, entry: Entry) -> None:
        """As `put`, but the driver does it. The handle gets the errors of `put`, if this does not raise the last one.

        For a thread that a signal handler may interrupt: if that happened in `put`, and the handler then waited for a
        collective, the driver would wait for the lock. The operations on deques are atomic.
        """
        self.later.append(entry)
        if self._closed_by is not None:
            raise self._closed_by

    def take_new(self) -> list[Entry]:
        """The entries put since the last call, in order. They stay in flight. For the thread that drives."""
        while self.later:
            entry = self.later.popleft()
            try:
                self.put(entry)
            except Exception as error:
                entry.handle.fail(error)
        if not self.new:
            return []  # An entry that is being put at this moment is followed by a wake-up.
        with self._lock:
            entries = list(self.new)
            self.new.clear()
        self.outstanding += len(entries)
        return entries

    def has(self, name: str) -> bool:
        """Whether an entry of this name is in flight."""
        with self._lock:
            return name in self._in_flight

    def in_flight(self) -> tuple[Entry, ...]:
        """The entries that are in flight, and those that wait behind one of their name."""
        with self._lock:
            return (*self._in_flight.values(), *chain.from_iterable(self._behind.values()))

    def finish(self, name: str) -> Entry:
        """Take an entry out of flight, before its handle is completed, so that its name may be used again.

        An entry that waits behind it is new then.

        `close` returns it until `executed` is called, so that no failure in between loses it. For the thread that
        drives.

        Raises:
            EngineError: No entry of this name is in flight.
        """
        with self._lock:
            entry = self._in_flight.pop(name, None)
            if entry is None:
                raise EngineError(f"{name} was decided on, but is not in flight on this rank: an error of mpistrat. "
                                  "Please report it.")
            self._executing.append(entry)
            if entry.request.failures and name in self._failed_in:
                self._forget(name, entry.request.failures)  # The number is the same on all ranks.
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
        """Forget the finished entries: they are complete, or the device completes them. For the thread that drives."""
        self._executing.clear()

    def refuse(self, error: Exception) -> None:
        """Refuse later entries with `error`. Any thread may call it; takes no lock. `close` follows."""
        self._closed_by = self._closed_by or error

    def disable_after_fork(self, error: Exception) -> None:
        """In a forked process: refuse all entries with `error`. What is in flight belongs to the parent process."""
        self._lock = threading.Lock()  # A thread that exists only in the parent process may hold the old one.
        self._closed_by = error
        for entries in (self._in_flight, self._behind, self._executing, self.new, self.later):
            entries.clear()

    def close(self, error: Exception) -> list[Entry]:
        """Refuse later entries with `error`, and take out all in flight or in execution. For the thread that drives."""
        with self._lock:
            if self._closed_by is None:
                self._closed_by = error
            entries = [*self._executing, *self._in_flight.values(), *chain.from_iterable(self._behind.values()),
                       *self.later]
            for each in (self._in_flight, self._behind, self._executing, self.new, self.later):
                each.clear()
        return entries


def _places(*origins: Origin | None) -> str:
    """The sentence that says where both entries of a name come from, as far as that is known."""
    first, second = (origin.place() if origin is not None else "a call outside of graphs" for origin in origins)
    return f" The first is submitted by {first}, the second by {second}." if any(origins) else ""
