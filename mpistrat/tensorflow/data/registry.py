"""ComputeService: where dispatchers and workers of a data service register, and others wait for them.

It runs in one thread per connection on rank 0 of the job of the workers. The training job reaches it by TCP, with the
addresses and the key of the configuration file.
"""

import contextlib
import platform
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from ...core.errors import DataServiceError
from ...process.addresses import local_addresses
from ...process.line import Line, Listening


class ComputeService:
    """The registry of a data service. Ends with `close`, or at the end of a `with` block.

    It listens on all addresses of this host, and answers those who have the key.

    Args:
        dispatchers: The number of dispatchers, at least 1.
        workers_per_dispatcher: The number of workers that each dispatcher has, at least 1.
        key: A secret of at least one byte. Default: a random one.

    Raises:
        OSError: No port can be had.
    """

    def __init__(self, dispatchers: int, workers_per_dispatcher: int, key: bytes | None = None):
        self.key = key or secrets.token_bytes(32)
        self._state = _Registrations(dispatchers, workers_per_dispatcher)
        listener = socket.create_server(("", 0), backlog=1024)
        self._port: int = listener.getsockname()[1]
        self._listening = Listening(listener, self.key, self._serve)

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """The IP addresses of this host, by its name, each with the port of the service."""
        return {platform.node(): [(address, self._port) for address in local_addresses() or ("127.0.0.1",)]}

    def close(self) -> None:
        """End the service. All who wait for something get an error. May be called twice."""
        self._state("shutdown")
        self._listening.close()

    def _serve(self, line: Line) -> None:
        """Answer the request of a line, in a thread of its own."""
        with contextlib.closing(line), contextlib.suppress(OSError):  # The other side has ended.
            request = line.receive()
            line.send(**self._state(request.pop("do"), **request))

    def __enter__(self) -> "ComputeService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Registrations:
    """Who has registered. The methods with public names are requests: they take and return their values."""

    def __init__(self, dispatchers: int, workers_per_dispatcher: int):
        self._dispatchers, self._workers_per_dispatcher = dispatchers, workers_per_dispatcher
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {each: set() for each in range(dispatchers)}
        self._ended: set[int] = set()
        self._is_shut_down = False
        self._changed = threading.Condition()

    def __call__(self, request: str, **values: object) -> dict[str, Any]:
        """The answer to a request: its values, the text of an error, or the missing party after a time-out."""
        if request.startswith("_") or not hasattr(self, request):
            return {"error": f"the data service of this version of mpistrat does not know {request!r}"}
        with self._changed:
            try:
                answer: dict[str, Any] | None = getattr(self, request)(**values)
            except (DataServiceError, TypeError) as error:  # TypeError: the client is of another version.
                return {"error": str(error)}
            self._changed.notify_all()
            return answer or {}

    def register_dispatcher(self, dispatcher: int, address: str) -> None:
        self._require(dispatcher)
        if dispatcher in self._addresses:
            raise DataServiceError(f"dispatcher {dispatcher} is already there, at {self._addresses[dispatcher]}")
        self._addresses[dispatcher] = address

    def end_dispatcher(self, dispatcher: int) -> None:
        """A dispatcher ends. The workers end when all have."""
        self._ended.add(dispatcher)

    def register_worker(self, dispatcher: int, worker: int) -> None:
        self._require(dispatcher)
        self._workers[dispatcher].add(worker)

    def wait_for_dispatcher(self, dispatcher: int, limit_s: float) -> dict[str, Any]:
        if not self._wait(dispatcher, lambda: dispatcher in self._addresses, limit_s):
            return {"timeout": f"dispatcher {dispatcher} of {self._dispatchers}"}
        return {"address": self._addresses[dispatcher]}

    def wait_for_workers(self, dispatcher: int, limit_s: float) -> dict[str, Any]:
        """Returns when all workers of a dispatcher are there."""
        workers = self._workers.get(dispatcher, set())
        if self._wait(dispatcher, lambda: len(workers) >= self._workers_per_dispatcher, limit_s):
            return {}
        return {"timeout": f"the workers of dispatcher {dispatcher}, of which {len(workers)} of "
                           f"{self._workers_per_dispatcher} are there"}

    def wait_for_end(self) -> None:
        """Returns when the service has been shut down, or all dispatchers have ended."""
        self._changed.wait_for(lambda: self._is_shut_down or len(self._ended) == self._dispatchers)

    def shutdown(self) -> None:
        self._is_shut_down = True

    def _wait(self, dispatcher: int, is_there: Callable[[], bool], limit_s: float) -> bool:
        self._changed.wait_for(lambda: self._problem(dispatcher) or is_there(), limit_s)
        self._require(dispatcher)
        return is_there()

    def _require(self, dispatcher: int) -> None:
        if problem := self._problem(dispatcher):
            raise DataServiceError(problem)

    def _problem(self, dispatcher: int) -> str:
        if not 0 <= dispatcher < self._dispatchers:
            return f"there is no dispatcher {dispatcher}; there are {self._dispatchers}, from 0"
        if self._is_shut_down:
            return "the data service has been shut down"
        return f"dispatcher {dispatcher} has ended" if dispatcher in self._ended else ""
