"""JSON messages between two processes of a job, over TCP or over a Unix socket in Linux' abstract namespace.

Other users can connect to both kinds of socket. So both ends prove that they know the secret of the job (challenge and
response with HMAC, RFC 2104). Messages are not encrypted. They contain names of hosts, ids of commits, and how
processes end, but no training data.

When a process ends, for whatever reason, the kernel closes its connections. A thread that waits for a message at the
other end then wakes up. Keep-alive probes detect a host that is down.
"""

import contextlib
import hmac
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection as Stream
from typing import Any

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Address = tuple[str, int] | str  # IP address and port, or the name of a Unix socket
_ADDRESS_LIMIT_S = 3.0  # for one of several addresses; a host that drops packets never answers
_PROOF_LIMIT_S = 5.0
_NONCE_BYTES = 32
_MOST_BYTES = 1 << 20  # of a message
_AGAIN_S = 0.1  # until the next try to accept a connection, after one has failed
_MOST_STRANGERS = 64  # connections that have not proved anything yet
_PROBE_S, _SILENT_S = 10.0, 60.0  # between two keep-alive probes, and until a host counts as down

_open: "weakref.WeakSet[Connection]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all connections in a forked process, because an open copy would keep the parent's connections alive."""
    for connection in _open:
        connection._stream.close()


os.register_at_fork(after_in_child=_close_in_child)


class Connection:
    """One end of a connection. Any thread may send, but only one thread may read.

    `stream`: A stream whose two ends know the secret. `own`, `peer`: The addresses of this end and of the other end.
    """

    def __init__(self, stream: "Stream[bytes, bytes]", own: Address, peer: Address):
        self._stream, self.own, self.peer = stream, own, peer
        self._lock = threading.Lock()
        _open.add(self)
        if isinstance(own, tuple):
            self.probe(_PROBE_S, _SILENT_S)

    def probe(self, every_s: float, limit_s: float) -> None:
        """Make the kernel probe the other end every `every_s` seconds (at least 1) while no data arrives. TCP only.

        The kernel closes the connection if a probe, or data that was sent, is not answered for `limit_s` seconds.
        """
        with socket.socket(fileno=os.dup(self._stream.fileno())) as shared:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                shared.setsockopt(socket.IPPROTO_TCP, option, max(1, round(every_s)))
            shared.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(limit_s * 1000))

    def fileno(self) -> int:
        """Return the file descriptor, for `multiprocessing.connection.wait`."""
        return self._stream.fileno()

    def send(self, **message: object) -> bool:
        """Send a message. Returns whether the connection is still open."""
        with contextlib.suppress(OSError), self._lock:  # The reader of this connection notices the end too.
            self._stream.send_bytes(json.dumps(message).encode())
            return True
        return False

    def poll(self, limit_s: float | None) -> bool:
        """Wait until a message or the end of the connection arrives. Return False if neither arrives in `limit_s`."""
        return self._stream.poll(limit_s)

    def receive(self) -> Message:
        """Wait for a message and return it. Raises OSError: The connection has ended, or the other host is down."""
        try:
            found = json.loads(self._stream.recv_bytes(_MOST_BYTES))
        except EOFError:
            raise OSError("the other end has closed the connection") from None
        except ValueError as error:
            raise OSError(f"the other end has sent an unknown message: {error}") from error
        if not isinstance(found, dict):
            raise OSError(f"the other end has sent an unknown message: {found}")
        return found

    def read(self, take: Callable[["Connection", Message | None], None]) -> None:
        """Start a thread that calls `take(self, message)` for each message, and `take(self, None)` after the last."""
        def run() -> None:
            while True:
                try:
                    message = self.receive()
                except OSError:
                    break
                take(self, message)
            take(self, None)
        threading.Thread(target=run, name="mpistrat-connection", daemon=True).start()

    def close(self) -> None:
        """Close the connection. Threads that wait for a message at either end wake up. May be called twice."""
        if not self._stream.closed:
            _shut_down(self._stream)  # close() alone would not wake a thread that reads.


def connect(addresses: Iterable[Address], secret: bytes, limit_s: float) -> Connection:
    """Return a connection to the process that listens at one of `addresses`.

    Raises OSError: No address answers within `limit_s`, or the listening process does not know the secret. The
    `__cause__` is the error of the last address; None if `addresses` is empty.
    """
    until, problems, cause = time.monotonic() + limit_s, [], None
    for address in addresses:
        name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else address
        left_s = min(max(until - time.monotonic(), 0.1), _ADDRESS_LIMIT_S)
        try:
            if isinstance(address, tuple):
                connected = socket.create_connection(address, timeout=left_s)
            else:
                connected = socket.socket(socket.AF_UNIX)
                connected.settimeout(left_s)
                connected.connect("\0" + address)
            own, peer = connected.getsockname(), connected.getpeername()
            connected.settimeout(None)
            stream = Stream(connected.detach())
            challenge = _received(stream)
            nonce = os.urandom(_NONCE_BYTES)
            stream.send_bytes(_proof(secret, b"connects", challenge) + nonce)
            if not hmac.compare_digest(_received(stream), _proof(secret, b"listens", nonce)):
                raise OSError("the process that listens at this address does not know the secret of the job")
            return Connection(stream, own, peer)
        except OSError as error:
            problems.append(f"{name}: {error}")
            cause = error
    raise OSError("; ".join(problems) or "the other process has no address") from cause


class Listening:
    """Accepts connections from processes that know the secret. Each connection has its own thread for this check.

    `listener`: A listening socket, which `close` closes. `greet`: Called with each accepted Connection, in its thread.
    """

    def __init__(self, listener: socket.socket, secret: bytes, greet: Callable[[Connection], None]):
        self._listener, self._secret, self._greet = listener, secret, greet
        self._strangers: dict[Stream[bytes, bytes], None] = {}  # in the order of arrival
        self._is_closed = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, name="mpistrat-listener", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                connected, peer = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                # An error of this connection, or too many open files, sockets or buffers, of which some may be freed.
                logger.debug("a connection was not accepted: %s", error)
                time.sleep(_AGAIN_S)
                continue
            connected.settimeout(None)
            own, stream = connected.getsockname(), Stream(connected.detach())
            with self._lock:
                if len(self._strangers) == _MOST_STRANGERS:
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    _shut_down(oldest)
                self._strangers[stream] = None
            threading.Thread(target=self._prove, args=(stream, own, peer), name="mpistrat-connection",
                             daemon=True).start()

    def _prove(self, stream: "Stream[bytes, bytes]", own: Address, peer: Address) -> None:
        try:
            challenge = os.urandom(_NONCE_BYTES)
            stream.send_bytes(challenge)
            answer = _received(stream)
            proof, nonce = answer[:-_NONCE_BYTES], answer[-_NONCE_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"connects", challenge)):
                raise OSError("the other end does not know the secret of the job")
            stream.send_bytes(_proof(self._secret, b"listens", nonce))
        except OSError as error:
            logger.debug("a connection was rejected: %s", error)
            with self._lock:  # Not while `_run` shuts it down as the oldest unproved connection.
                self._strangers.pop(stream, None)
                stream.close()
            return
        with self._lock:
            self._strangers.pop(stream, None)
        self._greet(Connection(stream, own, peer))

    def close(self) -> None:
        """Stop accepting connections. Accepted connections stay open. May be called twice."""
        self._is_closed = True
        with contextlib.suppress(OSError):  # It is closed.
            self._listener.shutdown(socket.SHUT_RDWR)  # close() alone would not wake the thread that accepts.
        self._listener.close()


def _shut_down(stream: "Stream[bytes, bytes]") -> None:
    with socket.socket(fileno=os.dup(stream.fileno())) as shared, contextlib.suppress(OSError):
        shared.shutdown(socket.SHUT_RDWR)  # OSError: The other end has closed it.


def _received(stream: "Stream[bytes, bytes]") -> bytes:
    if not stream.poll(_PROOF_LIMIT_S):
        raise OSError(f"no answer within {_PROOF_LIMIT_S:g} s")
    try:
        return stream.recv_bytes(4 * _NONCE_BYTES)
    except EOFError:
        raise OSError("the other end has closed the connection, perhaps because its secret differs") from None


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")
