"""Makes NCCL's communicators on all ranks, or on none.

ncclCommInitRank waits for all ranks without a limit, so a rank that fails alone would leave the others blocked in it.
Therefore each rank connects in a separate thread, and meanwhile exchanges its state with the other ranks.

NCCL opens the connections between ranks in their first collective (NCCL_RUNTIME_CONNECT, the default of 2.30). No room
in /dev/shm, or a blocked port, is an error in that collective. So connecting includes an all-reduce of one element.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from ..core.errors import EngineError
from ..core.request import ReduceOp
from ..core.tuning import NCCL_CONNECT_FIRST_SLEEP_S, NCCL_CONNECT_LONGEST_SLEEP_S, WATCHDOG_REVOKE_S
from .arrays import GpuDevice
from .nccl_types import OPERATIONS, UINT8, NcclCommunicator
from .watchdog import within

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Exchange(Protocol):
    """An allgather of plain values: None, numbers, text, and lists of them. Collective."""

    def __call__(self, value: T) -> list[T]:
        """The values of all ranks, by rank. Tuples may arrive as lists."""


def make_communicators(make: Callable[[], Iterable[NcclCommunicator]], device: GpuDevice, rank: int, exchange: Exchange,
                       limit_s: float, clock: Callable[[], float] = time.monotonic) -> list[NcclCommunicator]:
    """Make communicators and connect them; return them when all ranks have done so. Collective.

    Args:
        make: Makes this rank's communicators, and may wait for the other ranks. Called in another thread.
        exchange: An exchange among the same ranks, which must not depend on `make`.
        limit_s: Seconds after which connecting fails; 0: never.
        clock: Seconds, from any origin.

    Raises:
        EngineError: `make` has failed on a rank. Raised on all ranks soon afterwards; names the ranks and their errors.
            The communicators of the other ranks are aborted. A thread may stay blocked in NCCL until its process ends.
    """
    attempt, began, pause_s = _Attempt(make, device, rank), clock(), NCCL_CONNECT_FIRST_SLEEP_S
    while True:
        state = attempt.state
        if state is None and 0 < limit_s < clock() - began:
            state = f"not connected after {limit_s:g} s"
        states = exchange(state)
        failed = {rank: text for rank, text in enumerate(states) if text}
        if failed:
            attempt.give_up()
            raise EngineError("NCCL cannot connect the ranks: " + "; ".join(
                f"rank {rank}: {text}" for rank, text in failed.items()) +
                ". Set MPISTRAT_GPU_OPERATIONS=staged to reduce without NCCL.")
        if None not in states:
            return attempt.made
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, NCCL_CONNECT_LONGEST_SLEEP_S)


class _Attempt:
    """An attempt to make communicators, in a thread that may block for ever."""

    def __init__(self, make: Callable[[], Iterable[NcclCommunicator]], device: GpuDevice, rank: int):
        self._device, self._rank = device, rank
        self.made: list[NcclCommunicator] = []  # The communicators.
        self.state: str | None = None  # None while they are being made and connected, then "", or the error.
        self._is_given_up = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(make,), name="mpistrat-nccl-connect", daemon=True).start()

    def _run(self, make: Callable[[], Iterable[NcclCommunicator]]) -> None:
        state = ""
        try:
            with self._device.current():
                for communicator in make():
                    with self._lock:
                        self.made.append(communicator)
                    if self._is_given_up:
                        break
                    self._reduce_one_element(communicator)
        except Exception as error:  # Sent to all ranks, including this one.
            state = str(error) or repr(error)
        with self._lock:
            self.state = state
            if self._is_given_up:
                self._abort()

    def _reduce_one_element(self, communicator: NcclCommunicator) -> None:
        memory, stream = self._device.scratch(1), self._device.stream()
        if memory is None:
            raise MemoryError("the GPU has no memory left")
        communicator.allReduce(memory.address, memory.address, 1, UINT8, OPERATIONS[ReduceOp.MAX], stream.ptr)
        end = self._device.record(stream)
        while not end.done and not self._is_given_up:
            communicator.check_async_error()
            time.sleep(NCCL_CONNECT_FIRST_SLEEP_S)

    def give_up(self) -> None:
        """Abort the communicators: at once if the engine's thread does not use them, else when it stops.

        An abort frees memory that the engine's thread may use. So NCCL revokes them first, which ends its calls.
        """
        with self._lock:
            self._is_given_up = True
            revoked = [within(WATCHDOG_REVOKE_S, communicator.revoke) for communicator in self.made] \
                if self.state is None else [False]
            if not all(revoked):
                self._abort()

    def _abort(self) -> None:
        for communicator in self.made:
            try:
                communicator.abort()
            except Exception:  # The first failure is reported.
                logger.debug("rank %d: a communicator could not be aborted", self._rank, exc_info=True)
