"""NCCL's communicators, made on all ranks or on none.

A rank that fails alone would leave the others in ncclCommInitRank, which waits for all ranks without a limit. So every
rank connects in a thread of its own, and meanwhile keeps asking the others how far they are.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ...core.errors import EngineError

logger = logging.getLogger(__name__)

Exchange = Callable[[Any], list[Any]]  # of this rank's value for everybody's; collective

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.1  # between two questions of how far the others are


def make_communicators(make: Callable[[], list[Any]], device: Any, exchange: Exchange, limit_s: float,
                       clock: Callable[[], float] = time.monotonic) -> list[Any]:
    """What `make` returns, when it has returned on all ranks. Collective.

    Args:
        make: Makes this rank's communicators; waits for the other ranks as it likes. Called in another thread.
        device: This rank's GPU.
        exchange: Among the same ranks; it must not need what `make` waits for.
        limit_s: How long it may take; 0: for ever.
        clock: Seconds, from any origin.

    Raises:
        EngineError: On all ranks, soon after it has failed on one of them; names the ranks and their errors. What the
            others have made is aborted; a thread of theirs may stay behind in NCCL until the process ends.
    """
    attempt, began, pause_s = _Attempt(make, device), clock(), _FIRST_PAUSE_S
    while True:
        state = attempt.state
        if state is None and 0 < limit_s < clock() - began:
            state = f"not connected after {limit_s:g} s"
        told = exchange(state)
        failed = {rank: text for rank, text in enumerate(told) if text}
        if failed:
            attempt.give_up()
            raise EngineError("NCCL cannot connect the ranks: " + "; ".join(
                f"rank {rank}: {text}" for rank, text in failed.items()) +
                ". MPISTRAT_GPU_OPERATIONS=staged does without NCCL.")
        if None not in told:
            return attempt.made
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _Attempt:
    """Communicators in the making, in a thread that may wait for ever.

    Attributes:
        made: The communicators.
        state: None as long as they are being made, then "", or what has gone wrong.
    """

    def __init__(self, make: Callable[[], list[Any]], device: Any):
        self.made: list[Any] = []
        self.state: str | None = None
        self._is_given_up = False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, args=(make, device), name="mpistrat-nccl-connect", daemon=True).start()

    def _run(self, make: Callable[[], list[Any]], device: Any) -> None:
        state = ""
        try:
            with device.current():
                self.made = make()
        except Exception as error:  # Told to all ranks, this one included.
            state = str(error) or repr(error)
        with self._lock:
            self.state = state
            if self._is_given_up:
                _abort(self.made)

    def give_up(self) -> None:
        """Abort what has been made, now or when it is."""
        with self._lock:
            self._is_given_up = True
            if self.state is not None:
                _abort(self.made)


def _abort(communicators: Sequence[Any]) -> None:
    for communicator in communicators:
        try:
            communicator.abort()
        except Exception:  # The failure that led here is the one to report.
            logger.debug("a communicator could not be aborted", exc_info=True)
