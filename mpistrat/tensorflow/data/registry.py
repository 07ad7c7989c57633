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
from typing import Any

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
        self._state.shutdown()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "ComputeService":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Registrations:
    """Who has registered. Every method takes the values of a request, and returns those of its answer."""

    def __init__(self, dispatchers: int, workers_per_dispatcher: int):
        self._dispatchers, self._workers_per_dispatcher = dispatchers, workers_per_dispatcher
        self._addresses: dict[int, str] = {}
        self._workers: dict[int, set[int]] = {each: set() for each in range(dispatchers)}
        self._ended: set[int] = set()
        self._is_shut_down = False
        self._changed = threading.Condition()

    def register_dispatcher(self, dispatcher: int, address: str) -> dict[str, Any]:
        """A dispatcher serves at this address."""
        with self._changed:
            problem = self._problem(dispatcher)
            if not problem and dispatcher in self._addresses:
                problem = f"dispatcher {dispatcher} is already there, at {self._addresses[dispatcher]}"
            if problem:
                return {"error": problem}
            self._addresses[dispatcher] = address
            self._changed.notify_all()
            return {}

    def end_dispatcher(self, dispatcher: int) -> dict[str, Any]:
        """A dispatcher ends. The workers end when all have."""
        with self._changed:
            self._ended.add(dispatcher)
            self._changed.notify_all()
            return {}

    def register_worker(self, dispatcher: int, worker: int) -> dict[str, Any]:
        """A worker has registered with its dispatcher."""
        with self._changed:
            problem = self._problem(dispatcher)
            if problem:
                return {"error": problem}
            self._workers[dispatcher].add(worker)
            self._changed.notify_all()
            return {}

    def wait_for_dispatcher(self, dispatcher: int, limit_s: float) -> dict[str, Any]:
        """The address of a dispatcher, when it is there."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem(dispatcher) or dispatcher in self._addresses, limit_s)
            problem = self._problem(dispatcher)
            if not problem and dispatcher not in self._addresses:
                return {"timeout": f"dispatcher {dispatcher} of {self._dispatchers}"}
            return {"error": problem} if problem else {"address": self._addresses[dispatcher]}

    def wait_for_workers(self, dispatcher: int, limit_s: float) -> dict[str, Any]:
        """Returns when all workers of a dispatcher are there."""
        with self._changed:
            workers = self._workers.get(dispatcher, set())
            self._changed.wait_for(
                lambda: self._problem(dispatcher) or len(workers) >= self._workers_per_dispatcher, limit_s)
            problem = self._problem(dispatcher)
            if not problem and len(workers) < self._workers_per_dispatcher:
                return {"timeout": f"the workers of dispatcher {dispatcher}, of which {len(workers)} of "
                                   f"{self._workers_per_dispatcher} are there"}
            return {"error": problem} if problem else {}

    def wait_for_end(self) -> dict[str, Any]:
        """Returns when the service has been shut down, or all dispatchers have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_shut_down or len(self._ended) == self._dispatchers)
            return {}

    def shutdown(self) -> dict[str, Any]:
        """Tell all workers to end."""
        with self._changed:
            self._is_shut_down = True
            self._changed.notify_all()
            return {}

    def _problem(self, dispatcher: int) -> str:
        if not 0 <= dispatcher < self._dispatchers:
            return f"there is no dispatcher {dispatcher}; there are {self._dispatchers}, from 0"
        if self._is_shut_down:
            return "the data service has been shut down"
        return f"dispatcher {dispatcher} has ended" if dispatcher in self._ended else ""


_REQUESTS = {"register_dispatcher", "end_dispatcher", "register_worker", "wait_for_dispatcher", "wait_for_workers",
             "wait_for_end", "shutdown"}


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
        what = request.pop("do")
        if what in _REQUESTS:
            reply = getattr(self.server.state, what)(**request)
        else:
            reply = {"error": f"the data service of this version of mpistrat does not know {what!r}"}
        with contextlib.suppress(OSError):  # The other side has ended while it waited.
            wire.answer(connection, self.server.key, context, reply)
