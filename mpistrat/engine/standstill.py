"""Finds out whether this rank is blocked: it waits, and nothing happens in its process before the next decision.

negotiation/blocked.py has what rank 0 concludes from that. A rank is blocked when

- it has submitted something that rank 0 has not decided on, no vote is open, and its GPU is done; or it has called
  shutdown(), and submits no more;
- three looks, STANDSTILL_POLL_S apart, have found no change in that, and the latest two have found that the process was
  parked all the time between them (parked.py).

So a rank that computes, sleeps, reads data, or has another thread that may still submit something, is not blocked.
Called by the controller, in the thread that drives. A rank that works pays one comparison per cycle.
"""

import math

from ..core.interfaces import DeviceExecutor
from ..core.tuning import STANDSTILL_POLL_S
from ..negotiation.coordinator import Coordinator
from ..negotiation.fast_path import FastPath
from .life_cycle import LifeCycle
from .parked import ThreadScan
from .queue import TensorQueue


class Standstill:
    """Tells the coordinator of one rank whether the rank is blocked.

    Args:
        scan: Looks at the threads of this process; None: no rank counts as blocked.
        queue: What is submitted.
        coordinator: Gets the result.
        fast_path: The votes.
        device: The GPU.
        life: Whether this rank has called shutdown().

    Attributes:
        next_look_at: When `look` is due.
    """

    def __init__(self, scan: ThreadScan | None, queue: TensorQueue, coordinator: Coordinator, fast_path: FastPath,
                 device: DeviceExecutor, life: LifeCycle):
        self._scan, self._queue, self._coordinator, self._fast_path = scan, queue, coordinator, fast_path
        self._device, self._life = device, life
        self._state: tuple[object, ...] = ()
        self._seen: dict[int, int] | None = None
        self.next_look_at = -math.inf if scan else math.inf
        if scan:
            scan.queues.append(queue)

    def look(self, now: float) -> None:
        """To be called when it is due, after all submissions and decisions of the cycle."""
        self.next_look_at = now + STANDSTILL_POLL_S
        state = (self._queue.outstanding, self._queue.completed, self._coordinator.decisions,
                 self._life.is_end_announced)
        is_same, self._state = state == self._state, state
        before, self._seen = self._seen, None
        self._coordinator.set_blocked(is_same and self._waits() and (self._life.is_end_announced
                                                                    or self._is_parked(before)))

    def _waits(self) -> bool:
        """Whether this rank waits for a decision. Decisions that it has not executed wait for the end of a vote."""
        return (not self._fast_path.is_open and not self._device.is_busy
                and (self._life.is_end_announced or self._queue.outstanding > 0))

    def _is_parked(self, before: dict[int, int] | None) -> bool:
        """Whether the process has been parked since the look before this one."""
        assert self._scan is not None
        if not any(queue.outstanding for queue in self._scan.queues if queue is not self._queue):
            self._seen = self._scan.look()
        return self._seen is not None and self._seen == before
