"""Liveness: each rank has a line to the chief, on which both sides detect the end of the other.

The kernel ends a line when its process ends. So waiting costs no processor time, needs no timeout, and does not depend
on MPI, whose collectives cannot complete without a rank that has died. A normal end is announced: the chief sends a
farewell with the ranks that have died, the other ranks send that they leave. An end without announcement is a death.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue

from ...core.errors import RankDiedError
from ...process.line import Line, Listening, connect

_CONNECT_LIMIT_S = 30.0  # for all addresses of the chief
_ACCEPT_LIMIT_S = 30.0  # for the next rank to arrive
# A rank waits so long before it reports the chief's death. mpirun usually ends the job in that time, and then only the
# chief's own error is printed.
_LAUNCHER_S = 3.0


class LivenessServer:
    """The chief's side of all lines.

    Args:
        local: Whether all ranks are on this host.

    Attributes:
        port: The port on which it listens.
        token: 32 random bytes that the other ranks must know.

    Raises:
        OSError: There is no free port.
    """

    def __init__(self, local: bool):
        listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self.token = secrets.token_bytes(32)
        self._arrived: SimpleQueue[tuple[Line, int]] = SimpleQueue()
        self._lines: dict[Line, int] = {}  # of ranks that have not announced their end
        self._left: list[Line] = []
        self._died: set[int] = set()
        self._thread: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()
        self._listening = Listening(listener, self.token, self._greet)

    def _greet(self, line: Line) -> None:
        with contextlib.suppress(OSError):  # The rank has ended already, and is missed.
            self._arrived.put((line, line.receive()["rank"]))

    def accept(self, ranks: Sequence[int]) -> None:
        """Wait for the lines of `ranks`, and accept no more.

        Raises:
            OSError: One has not arrived in time.
        """
        missing = set(ranks)
        try:
            while missing:
                line, rank = self._arrived.get(timeout=_ACCEPT_LIMIT_S)
                self._lines[line] = rank
                missing.discard(rank)
        except Empty:
            raise OSError(f"no connection of ranks {sorted(missing)} has arrived here") from None
        finally:
            self._listening.close()

    def watch(self, when_ended: Callable[[int, bool], None]) -> None:
        """Start a thread that calls `when_ended(rank, died)` when a rank ends before the chief does."""
        self._thread = threading.Thread(target=self._watch, args=(when_ended,), name="mpistrat-liveness", daemon=True)
        self._thread.start()

    def _watch(self, when_ended: Callable[[int, bool], None]) -> None:
        while True:
            ready = wait([self._woken, *self._lines])  # type: ignore[list-item]  # that have fileno()
            if self._woken in ready:
                return
            for line in self._lines.keys() & ready:
                when_ended(*self._end_of(line))

    def _end_of(self, line: Line) -> tuple[int, bool]:
        """Read the last message of a rank that has ended. Returns the rank, and whether it has died."""
        rank = self._lines.pop(line)
        try:
            line.receive()
        except OSError:
            self._died.add(rank)
            return rank, True
        self._left.append(line)
        return rank, False

    def close(self) -> tuple[int, ...]:
        """Send the farewell to all others. Returns the ranks that have died. May be called twice."""
        if self._thread is not None:
            self._wake.send(b"\0")
            self._thread.join()
            self._thread = None
        self._listening.close()
        for line in self._lines.keys() & wait(self._lines, 0):  # type: ignore[arg-type]
            self._end_of(line)
        died = tuple(sorted(self._died))
        for line in (*self._lines, *self._left):
            line.send(died=died)
            line.close()
        self._lines, self._left = {}, []
        self._wake.close()
        self._woken.close()
        return died


class LivenessClient:
    """The side of a rank that is not the chief.

    Args:
        addresses: Addresses of the chief; the first that works is used.
        port: The port on which the chief listens.
        token: That of the LivenessServer.
        rank: This rank.

    Attributes:
        own_address, chief_address: The IP addresses of the line.

    Raises:
        OSError: The chief cannot be reached; with a problem for each address.
    """

    def __init__(self, addresses: Sequence[str], port: int, token: bytes, rank: int):
        self._line = connect([(address, port) for address in addresses], token, _CONNECT_LIMIT_S)
        self._line.send(rank=rank)
        self.own_address: str = self._line.own[0]
        self.chief_address: str = self._line.peer[0]
        self._has_left = False
        self._died: tuple[int, ...] | None = None

    def wait(self, timeout_s: float | None) -> tuple[int, ...] | None:
        """Wait until the chief has ended. Returns the ranks that had died by then, or None after `timeout_s`.

        Raises:
            RankDiedError: The chief has died.
        """
        if self._died is None and self._line.poll(timeout_s):
            try:
                self._died = tuple(self._line.receive()["died"])
            except OSError as error:
                time.sleep(_LAUNCHER_S)
                raise RankDiedError("rank 0, the chief, has died or was killed.") from error
        return self._died

    def leave(self) -> None:
        """Notify the chief that this rank leaves. `wait` still works. May be called twice."""
        if not self._has_left:
            self._has_left = True
            self._line.send(leaves=True)

    def close(self) -> None:
        """Close the line. May be called twice."""
        self._line.close()
