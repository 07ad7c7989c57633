"""Authenticated requests of the data service: one JSON request and its answer per TCP connection.

Each message carries an HMAC-SHA256 with the key of the service. The server begins with a random challenge, and a
request has a random number of its own, so neither can be replayed. Nothing is encrypted: addresses and numbers travel.
Called by the registry, in a thread for each request, and by its clients.
"""

import hmac
import json
import secrets
import socket
import struct
from typing import Any

CHALLENGE_BYTES = 32
_HEADER = struct.Struct("!32sI")  # HMAC-SHA256 of a message, and its length in bytes
_MAX_BYTES = 2**16


class WireError(OSError):
    """The other side has closed the connection, has another key, or does not speak this protocol."""


def new_challenge() -> bytes:
    """What a server sends first on a connection."""
    return secrets.token_bytes(CHALLENGE_BYTES)


def ask(connection: socket.socket, key: bytes, request: dict[str, Any]) -> dict[str, Any]:
    """Send a request, and return its answer. Waits as long as the connection's timeout allows.

    Raises:
        OSError: The connection has failed, or the other side has another key.
    """
    challenge = _receive(connection, CHALLENGE_BYTES)
    sent = _send(connection, key, b"request" + challenge, {**request, "number": secrets.token_hex(16)})
    return _read(connection, key, b"answer" + sent)[0]


def read_request(connection: socket.socket, key: bytes, challenge: bytes) -> tuple[dict[str, Any], bytes]:
    """The request, and the context of its answer. Raises OSError if it does not come from a holder of the key."""
    request, code = _read(connection, key, b"request" + challenge)
    return request, b"answer" + code


def answer(connection: socket.socket, key: bytes, context: bytes, content: dict[str, Any]) -> None:
    """Answer a request, in the context that `read_request` has returned."""
    _send(connection, key, context, content)


def _send(connection: socket.socket, key: bytes, context: bytes, content: dict[str, Any]) -> bytes:
    body = json.dumps(content).encode()
    code = hmac.digest(key, context + body, "sha256")
    connection.sendall(_HEADER.pack(code, len(body)) + body)
    return code


def _read(connection: socket.socket, key: bytes, context: bytes) -> tuple[dict[str, Any], bytes]:
    code, length = _HEADER.unpack(_receive(connection, _HEADER.size))
    if length > _MAX_BYTES:
        raise WireError(f"a message of {length} bytes, which is no message of the data service")
    body = _receive(connection, length)
    if not hmac.compare_digest(code, hmac.digest(key, context + body, "sha256")):
        raise WireError("a message that was not made with the key of the configuration")
    return json.loads(body), code


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise WireError("the connection was closed by the other side")
        received += part
    return received
