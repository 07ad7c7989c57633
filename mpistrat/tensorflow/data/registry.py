"""ComputeService: where dispatchers and workers of a data service register, and others wait for them.

It runs in one thread per connection on rank 0 of the job of the workers. The training job reaches it by TCP, with the
addresses and the key of the configuration file.
"""

import contextlib
import platform
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any

from ...core.errors import DataServiceError
from ...core.tuning import DATA_SERVICE_END_POLL_S
from ...process.silent_hosts import local_addresses
from ..cluster.liveness import keep_alive
from . import wire

_REQUEST_LIMIT_S = 10.0  # for a connection to send its request


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
        self._server = _Server(self._state, self.key)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(DATA_SERVICE_END_POLL_S,),
                                        name="mpistrat-data-service", daemon=True)
        self._thread.start()

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """The IP addresses of this host, by its name, each with the port of the service."""
        port = self._server.server_address[1]
        return {platform.node(): [(address, port) for address in local_addresses() or ("127.0.0.1",)]}

    def close(self) -> None:
        """End the service. All who wait for something get an error. May be called twice."""
        self._state("shutdown")
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

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
            except DataServiceError as error:
                return {"error": str(error)}
            self._changed.notify_all()
            return answer or {}

    def register_dispatcher(self, dispatcher: int, address: str) -> None:
        """A dispatcher serves at this address."""
        self._require(dispatcher)
        if dispatcher in self._addresses:
            raise DataServiceError(f"dispatcher {dispatcher} is already there, at {self._addresses[dispatcher]}")
        self._addresses[dispatcher] = address

    def end_dispatcher(self, dispatcher: int) -> None:
        """A dispatcher ends. The workers end when all have."""
        self._ended.add(dispatcher)

    def register_worker(self, dispatcher: int, worker: int) -> None:
        """A worker has registered with its dispatcher."""
        self._require(dispatcher)
        self._workers[dispatcher].add(worker)

    def wait_for_dispatcher(self, dispatcher: int, limit_s: float) -> dict[str, Any]:
        """The address of a dispatcher, when it is there."""
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
        """Tell all workers to end."""
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


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 1024

    def __init__(self, state: _Registrations, key: bytes):
        self.state, self.key = state, key
        super().__init__(("", 0), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Close the connection, which socketserver does. The other side says what it has waited for."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        connection: socket.socket = self.request
        connection.settimeout(_REQUEST_LIMIT_S)
        challenge = wire.new_challenge()
        connection.sendall(challenge)
        request, context = wire.read_request(connection, self.server.key, challenge)
        keep_alive(connection)
        request.pop("number")
        reply = self.server.state(request.pop("do"), **request)
        with contextlib.suppress(OSError):  # The other side has ended while it waited.
            wire.answer(connection, self.server.key, context, reply)
