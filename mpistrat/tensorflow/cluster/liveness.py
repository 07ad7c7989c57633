"""Liveness: a TCP connection of each rank to the chief, over which both learn when the other ends, however it ends.

The kernel closes a connection when its process ends, and wakes who waits for it. So waiting costs nothing, needs no
limit, and does not depend on MPI, whose collectives cannot complete without a rank that has died. Who ends well says so
first: the chief tells all others that the work is done and which ranks have died, the others say that they leave. An
end without that is a death. Keep-alive probes find a host that has gone without a word.

Anybody can connect to the chief's port while it listens. Who does not say the token of the job is turned away; one that
says nothing holds up nobody.
"""

import contextlib
import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from ...core.errors import RankDiedError

_HELLO = struct.Struct("!32sI")
_LEAVING = b"leaving"
_CONNECT_LIMIT_S = 3.0  # for one address; a host that drops packets answers never
_HELLO_LIMIT_S = 10.0
_MOST_SILENT = 128  # connections of which the chief does not know yet whose they are
_ACCEPT_LIMIT_S = 30.0  # for a rank to find an address that works
_LONGEST_WORDS = 2**20  # bytes of what is said at the end
_LAUNCHER_S = 3.0  # mpirun mostly ends the job then, so that the error that the chief has printed stands alone
_KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a lost host is noticed after a minute

_connections: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """In a forked process: a connection ends when the last process that has it ends, and that must be the rank."""
    for line in _connections:
        line.close()


os.register_at_fork(after_in_child=_close_in_child)


class LivenessServer:
    """The chief's ends.

    Args:
        local: Whether all ranks are on this host.
    """

    def __init__(self, local: bool):
        self._listener: socket.socket | None = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._lines: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        self._died: set[int] = set()
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()

    def accept(self, ranks: Sequence[int], token: bytes) -> None:
        """Take the connections of `ranks`.

        Raises:
            OSError: One has not come in time.
        """
        assert self._listener is not None
        missing, until = set(ranks), time.monotonic() + _ACCEPT_LIMIT_S
        self._listener.setblocking(False)
        silent: dict[socket.socket, _Unknown] = {}  # the one that has come first is the first
        with contextlib.ExitStack() as at_end, selectors.DefaultSelector() as selector:
            at_end.callback(_close_all, silent)
            selector.register(self._listener, selectors.EVENT_READ)
            while missing:
                now = time.monotonic()
                if now >= until:
                    raise OSError(f"no connection of ranks {sorted(missing)} has arrived here")
                for line in [line for line, unknown in silent.items() if now >= unknown.until]:
                    self._turn_away(line, silent, selector)
                next_s = min([until, *(unknown.until for unknown in silent.values())]) - now
                for key, _ in selector.select(next_s):
                    line = key.fileobj  # type: ignore[assignment]
                    if line is self._listener:
                        self._let_in(silent, selector)
                        continue
                    if line not in silent:
                        continue  # turned away for one that has just come
                    hello = silent[line].read(line)
                    if hello is None:
                        continue
                    said, rank = hello
                    if not hmac.compare_digest(said, token) or rank not in missing:
                        self._turn_away(line, silent, selector)
                        continue
                    del silent[line]
                    selector.unregister(line)
                    line.setblocking(True)
                    _keep_alive(line)
                    self._lines[rank] = line
                    missing.remove(rank)
                    until = time.monotonic() + _ACCEPT_LIMIT_S
        self._listener.close()
        self._listener = None

    def _let_in(self, silent: "dict[socket.socket, _Unknown]", selector: selectors.BaseSelector) -> None:
        assert self._listener is not None
        try:
            line, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # It has gone again.
        line.setblocking(False)
        if len(silent) == _MOST_SILENT:
            self._turn_away(next(iter(silent)), silent, selector)
        silent[line] = _Unknown(time.monotonic() + _HELLO_LIMIT_S)
        selector.register(line, selectors.EVENT_READ)

    def _turn_away(self, line: socket.socket, silent: "dict[socket.socket, _Unknown]",
                   selector: selectors.BaseSelector) -> None:
        del silent[line]
        selector.unregister(line)
        line.close()

    def watch(self, when_ended: Callable[[int, bool], None]) -> None:
        """From now on, call `when_ended(rank, died)` in a thread of its own when a rank ends before the chief does."""
        self._thread = threading.Thread(target=self._watch, args=(when_ended,), name="mpistrat-lifelines", daemon=True)
        self._thread.start()

    def _watch(self, when_ended: Callable[[int, bool], None]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for rank, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    selector.unregister(key.fileobj)
                    when_ended(key.data, self._end_of(key.data))

    def _end_of(self, rank: int) -> bool:
        """Read the last words of a rank that has ended; whether it has died."""
        died = _read(self._lines[rank]) != _LEAVING
        if died:
            self._died.add(rank)
            self._lines.pop(rank).close()
        else:
            self._left.add(rank)
        return died

    def close(self) -> tuple[int, ...]:
        """Tell all others that the work is done. Returns the ranks that have died. May be called twice."""
        if self._thread is not None:
            self._wake.send(b"\0")
            self._thread.join()
            self._thread = None
        if self._listener is not None:
            self._listener.close()
        for rank in self._lines.keys() - self._left:
            if _readable(self._lines[rank], 0):
                self._end_of(rank)
        farewell = json.dumps(sorted(self._died)).encode()
        while self._lines:
            _, line = self._lines.popitem()
            with contextlib.suppress(OSError):  # it ends at this very moment
                line.sendall(farewell)
                line.shutdown(socket.SHUT_WR)
            line.close()
        self._wake.close()
        self._woken.close()
        return tuple(sorted(self._died))


class _Unknown:
    """A connection that has not said all of its hello, and has time for it until then."""

    def __init__(self, until: float):
        self.until = until
        self._hello = b""

    def read(self, line: socket.socket) -> tuple[bytes, int] | None:
        """Token and rank as they are said; none of either if it ends or is something else; None: not all has come."""
        try:
            part = line.recv(_HELLO.size - len(self._hello))
        except BlockingIOError:
            return None
        except OSError:
            part = b""  # a reset
        self._hello += part
        if len(self._hello) == _HELLO.size:
            said, rank = _HELLO.unpack(self._hello)
            return said, rank
        return None if part else (b"", -1)


class LivenessClient:
    """The end of a rank that is not the chief.

    Args:
        addresses: Of the chief, the first that works is taken.
        port: Where the chief listens.
        token: 32 bytes by which the chief knows its own.
        rank: This rank.

    Raises:
        OSError: The chief cannot be reached; with a line for each address.
    """

    def __init__(self, addresses: Sequence[str], port: int, token: bytes, rank: int):
        reasons = []
        for address in addresses:
            try:
                self._line = socket.create_connection((address, port), _CONNECT_LIMIT_S)
                break
            except OSError as error:
                reasons.append(f"{address}:{port}: {error}")
        else:
            raise OSError("; ".join(reasons) or "it has no address")
        self._line.sendall(_HELLO.pack(token, rank))
        self._line.settimeout(None)
        _keep_alive(self._line)
        self.own_address: str = self._line.getsockname()[0]
        self.chief_address: str = self._line.getpeername()[0]
        self._has_left = False
        self._died: tuple[int, ...] | None = None

    def wait(self, timeout_s: float | None) -> tuple[int, ...] | None:
        """Wait until the chief has ended; the ranks that had died by then, or None if `timeout_s` has passed before.

        Raises:
            RankDiedError: The chief has died.
        """
        if self._died is None and _readable(self._line, timeout_s):
            died = _ranks_in(_read(self._line))
            if died is None:
                time.sleep(_LAUNCHER_S)
                raise RankDiedError("rank 0, the chief, has died or was killed.")
            self._died = died
        return self._died

    def leave(self) -> None:
        """Tell the chief that this rank needs it no more. `wait` still works. May be called twice."""
        if not self._has_left:
            self._has_left = True
            with contextlib.suppress(OSError):  # the chief has ended before
                self._line.sendall(_LEAVING)
                self._line.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Give up the connection. May be called twice."""
        self._line.close()


def _keep_alive(line: socket.socket) -> None:
    """Let this end notice when the other host is gone, and the other end notice when this process is."""
    _connections.add(line)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _close_all(lines: Iterable[socket.socket]) -> None:
    for line in lines:
        line.close()


def _readable(line: socket.socket, timeout_s: float | None) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


def _read(line: socket.socket) -> bytes:
    """All that comes until the other side ends; nothing, if that is longer than what is said at the end."""
    text = b""
    with contextlib.suppress(OSError):  # a reset: it was killed with something unread
        while part := line.recv(4096):
            text += part
            if len(text) > _LONGEST_WORDS:
                return b""
    return text


def _ranks_in(text: bytes) -> tuple[int, ...] | None:
    """The ranks of a farewell; None if it is none, or was cut off."""
    try:
        ranks = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(ranks, list) or not all(type(rank) is int and rank >= 0 for rank in ranks):
        return None
    return tuple(ranks)
