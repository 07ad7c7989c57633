"""A line: JSON messages between two processes of a job, over TCP or over a Unix socket of Linux' abstract namespace.

Both ends prove that they know the secret of the job, so other users, who can connect to either, are rejected
(challenge and response with HMAC, RFC 2104). Messages are not encrypted: they say who has ended and what was committed,
and hold no data of the training.
"""

import hmac
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Address = tuple[str, int] | str
_PROOF_LIMIT_S = 5.0
_NONCE_BYTES = 32
_MOST_BYTES = 1 << 20  # of a message
_MOST_STRANGERS = 64  # connections that have not proved anything yet


class Line:
    """One end of a line. Any thread may send; one thread reads.

    Args:
        connection: Both ends of it have proved that they know the secret.
        peer: The address of the other end; "" on the same host.

    Attributes:
        peer: The argument.
    """

    def __init__(self, connection: "Connection[bytes, bytes]", peer: str = ""):
        self._connection, self.peer = connection, peer
        self._lock = threading.Lock()

    def send(self, **message: Any) -> bool:
        """Send a message. Returns whether the line is still open."""
        try:
            with self._lock:
                self._connection.send_bytes(json.dumps(message).encode())
            return True
        except OSError:
            return False  # The reader of this line notices too, and says so.

    def receive(self) -> Message | None:
        """Wait for a message and return it; None after the other end has closed the line, or has ended."""
        try:
            found = json.loads(self._connection.recv_bytes(_MOST_BYTES))
        except (OSError, EOFError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def read(self, take: Callable[["Line", Message | None], None]) -> None:
        """Call `take` with this line and each message, and with None after the last one, in a thread of its own."""
        def run() -> None:
            while (message := self.receive()) is not None:
                take(self, message)
            take(self, None)
        threading.Thread(target=run, name="mpistrat-line", daemon=True).start()

    def close(self) -> None:
        """Close this end, so that a thread that reads here, and the other end, get None. May be called twice."""
        if self._connection.closed:
            return
        # close() alone would not wake a thread that reads.
        with socket.socket(fileno=os.dup(self._connection.fileno())) as shared:
            try:
                shared.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The other end has closed it.


def connect(addresses: Iterable[Address], secret: bytes, limit_s: float) -> Line:
    """Return a line to the process that listens at one of `addresses`: (host, port), or an abstract name.

    Raises:
        OSError: None of them answers within `limit_s`, or what listens there does not know the secret.
    """
    until, problems = time.monotonic() + limit_s, []
    for address in addresses:
        left_s = max(until - time.monotonic(), 0.1)
        try:
            if isinstance(address, str):
                connected = socket.socket(socket.AF_UNIX)
                connected.settimeout(left_s)
                connected.connect("\0" + address)
            else:
                connected = socket.create_connection(address, timeout=left_s)
            connected.settimeout(None)
            connection = Connection(connected.detach())
            challenge = _received(connection)
            nonce = os.urandom(_NONCE_BYTES)
            connection.send_bytes(_proof(secret, b"connects", challenge) + nonce)
            if not hmac.compare_digest(_received(connection), _proof(secret, b"listens", nonce)):
                raise OSError("what listens there does not know the secret of the job")
            return Line(connection)
        except (OSError, EOFError) as error:
            problems.append(f"{address}: {error}")
    raise OSError("; ".join(problems) or "there is no address to connect to")


class Listening:
    """Accepts lines, each in a thread until the other end has proved that it knows the secret.

    Args:
        listener: A socket that listens. `close` closes it.
        secret: Of the job.
        greet: Called with each new line, in a thread of its own.
    """

    def __init__(self, listener: socket.socket, secret: bytes, greet: Callable[[Line], None]):
        self._listener, self._secret, self._greet = listener, secret, greet
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        threading.Thread(target=self._run, name="mpistrat-listener", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError:
                return  # closed
            if not self._strangers.acquire(blocking=False):
                connected.close()
                continue
            connected.settimeout(None)
            peer = str(address[0]) if isinstance(address, tuple) else ""
            threading.Thread(target=self._prove, args=(Connection(connected.detach()), peer), name="mpistrat-line",
                             daemon=True).start()

    def _prove(self, connection: "Connection[bytes, bytes]", peer: str) -> None:
        try:
            challenge = os.urandom(_NONCE_BYTES)
            connection.send_bytes(challenge)
            answer = _received(connection)
            proof, nonce = answer[:-_NONCE_BYTES], answer[-_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"connects", challenge)):
                raise OSError("it does not know the secret of the job")
            connection.send_bytes(_proof(self._secret, b"listens", nonce))
        except (OSError, EOFError) as error:
            logger.debug("a connection was rejected: %s", error)
            connection.close()
            return
        finally:
            self._strangers.release()
        self._greet(Line(connection, peer))

    def close(self) -> None:
        """Accept no more. Lines stay open."""
        self._listener.close()


def _received(connection: "Connection[bytes, bytes]") -> bytes:
    if not connection.poll(_PROOF_LIMIT_S):
        raise OSError(f"no answer within {_PROOF_LIMIT_S:g} s")
    return connection.recv_bytes(4 * _NONCE_BYTES)


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")
