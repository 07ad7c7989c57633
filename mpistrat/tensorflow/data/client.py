"""ComputeClient: what the ranks of both jobs ask the registry of a data service.

Called by compute_service.py and config.py; no rank waits for another here.
"""

import contextlib
import logging
import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.errors import DataServiceError
from ...process.addresses import elsewhere, local_addresses
from ...process.line import Address, Line, connect

logger = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 30.0  # for all addresses
_ANSWER_LIMIT_S = 10.0  # for an answer, after the time that the request itself may wait
_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # of RFC 5737: it has a route where there is a default route, and no host


class ComputeClient:
    """Asks the registry of a data service. Local; every call is one connection. Any thread may call it.

    Args:
        addresses: Those of the configuration.
        key: Likewise.
        verbose: 2: log what is registered and waited for, at level INFO.

    Raises:
        DataServiceError: From every method: the service does not answer, has ended, or has answered with an error.
    """

    def __init__(self, addresses: Mapping[str, Sequence[tuple[str, int]]], key: bytes, verbose: int = 1):
        self._addresses, self._key, self._verbose = addresses, key, verbose
        self._working: Address | None = None

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Tell all who wait for this dispatcher its address, such as "grpc://10.0.0.1:5050"."""
        self._log("dispatcher %d is at %s", dispatcher_id, dispatcher_address)
        self._ask(f"to register dispatcher {dispatcher_id}", "register_dispatcher", dispatcher=dispatcher_id,
                  address=dispatcher_address)

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Return the address of a dispatcher. Waits up to `timeout` seconds for it, then raises DataServiceError."""
        return str(self._wait(f"for dispatcher {dispatcher_id}", "wait_for_dispatcher", timeout,
                              dispatcher=dispatcher_id)["address"])

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Tell that a worker has started. `worker_id` is its rank."""
        self._log("worker %d of dispatcher %d has started", worker_id, dispatcher_id)
        self._ask(f"to register worker {worker_id}", "register_worker", dispatcher=dispatcher_id, worker=worker_id)

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Wait up to `timeout` seconds for all workers of a dispatcher, then raise DataServiceError."""
        self._wait(f"for the workers of dispatcher {dispatcher_id}", "wait_for_workers", timeout,
                   dispatcher=dispatcher_id)

    def end_dispatcher(self, dispatcher_id: int) -> None:
        """Tell that a dispatcher ends. The workers end when all dispatchers have. Nothing happens if they have already.
        """
        self._tell_if_there(f"to end dispatcher {dispatcher_id}", "end_dispatcher", dispatcher=dispatcher_id)

    def shutdown(self) -> None:
        """End the workers and dispatchers of the service. Call it on one rank, when no rank reads any more.

        Nothing happens if the service has ended already.
        """
        self._tell_if_there("to shut down", "shutdown")

    def _tell_if_there(self, purpose: str, what: str, **values: Any) -> None:
        try:
            self._ask(purpose, what, **values)
        except DataServiceError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            self._log("it has ended already: %s", error)

    def wait_for_shutdown(self) -> None:
        """Wait, for as long as it takes, until the service is shut down or all dispatchers have ended."""
        self._ask("for its end", "wait_for_end", answer_limit_s=None)

    def link(self) -> tuple[str, str]:
        """The IP addresses of a connection to the registry: this host's and the registry's."""
        with contextlib.closing(self._connect("for an address")) as line:
            return line.own[0], line.peer[0]

    def own_address(self) -> str:
        """The IP address at which other hosts reach this one: that of its connection to the registry.

        On the registry's own host it is that of the default route, or else of the first interface, or 127.0.0.1.
        """
        own, registry = self.link()
        return own if own != registry else address_of_host()

    def _wait(self, purpose: str, what: str, timeout: float, **values: Any) -> dict[str, Any]:
        self._log("waiting %s", purpose)
        answer = self._ask(purpose, what, timeout + _ANSWER_LIMIT_S, limit_s=timeout, **values)
        if "timeout" in answer:
            raise DataServiceError(f"this rank has waited {timeout:g} s for {answer['timeout']}. Has the other job "
                                   "started, with enough ranks? The limit is --timeout of compute_worker.")
        return answer

    def _ask(self, purpose: str, what: str, answer_limit_s: float | None = _ANSWER_LIMIT_S,
             **values: Any) -> dict[str, Any]:
        with contextlib.closing(self._connect(purpose)) as line:
            line.send(do=what, **values)
            try:
                if not line.poll(answer_limit_s):
                    raise OSError(f"no answer within {answer_limit_s} s")
                answer = line.receive()
            except OSError as error:
                raise DataServiceError(f"the data service has failed while this rank asked {purpose}: {error}. Has "
                                       "its job ended?") from error
        if "error" in answer:
            raise DataServiceError(f"{answer['error']} (this rank asked {purpose}).")
        return answer

    def _connect(self, purpose: str) -> Line:
        try:
            line = connect([self._working] if self._working else self._candidates(), self._key, _CONNECT_LIMIT_S)
        except OSError as error:
            raise DataServiceError(
                f"the data service on {', '.join(self._addresses)} does not answer this rank, which asks {purpose} "
                f"({error}). Has its job ended, so that the configuration is an old one? Is there a firewall between "
                "the hosts?") from error.__cause__  # None if there was no address to try.
        self._working = line.peer[:2]
        return line

    def _candidates(self) -> list[tuple[str, int]]:
        found = []
        for host, pairs in self._addresses.items():
            ports = dict(pairs)
            found += [(each, ports[each]) for each in (ports if host == platform.node() else elsewhere(ports))]
        return found

    def _log(self, text: str, *values: object) -> None:
        logger.log(logging.INFO if self._verbose >= 2 else logging.DEBUG, "data service: " + text, *values)


def address_of_host() -> str:
    """This host's IP address on the default route, or else that of its first interface, or 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unconnected, contextlib.suppress(OSError):
        unconnected.connect(_DOCUMENTATION_ADDRESS)  # A datagram socket sends nothing here.
        return str(unconnected.getsockname()[0])
    return (*local_addresses(), "127.0.0.1")[0]
