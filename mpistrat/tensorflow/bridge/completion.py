"""Completion queues: the engine's thread wakes nodes of running graphs through TensorFlow queues.

TensorFlow's dequeue kernel is asynchronous, so a node that waits for an element blocks no thread. Each execution of a
collective waits on a queue of its own. One queue for all executions of a collective would be wrong: if TensorFlow
cancels an execution because of an error elsewhere in the graph, the element stays in the queue, and the next execution
would read it before its own collective is complete. A queue is used again when no execution can read it any more.

No graph captures a queue. The callback that starts a wait returns a *ticket*: arrays that contain the queue's handle as
a string. So collectives can also wait in the gradient of a branch or a loop, which cannot capture anything.

A wait ends when the result is fetched. A wait is *abandoned* if its result is never fetched, because the execution was
cancelled or does not use the result. The reference count of the ticket's memory shows that a wait is abandoned, because
TensorFlow does not copy this memory: as long as a reference exists, a node may still read the ticket or the queue.
"""

import itertools
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from ...core.handle import Handle
from ...core.memory import ALIGNMENT, aligned_empty
from ...core.tuning import COMPLETION_QUEUES_MADE, COMPLETION_QUEUES_WRITTEN
from .private_names import SynchronousExecution
from .types import Arrays

# A ticket: the numbers of the execution and of the queue in one integer; the number of elements to read from the queue
# (one, or none if the collective was complete when the ticket was made); and the queue's handle.
TICKET = (tf.int64, tf.int32, tf.string)
_QUEUES = 2**20  # the largest number of queues

_instances = itertools.count()


@dataclass(slots=True, eq=False)
class _PendingWait:
    """A graph's wait for one result, from the submit of the collective to the fetch of the result."""

    queue: tf.Tensor
    handle: Handle
    is_woken: bool = False  # Whether the queue has been written.


class _Slot:
    """A queue, and the memory of the ticket by which a node finds the queue. For one wait at a time."""

    __slots__ = ("_idle", "_ticket", "number", "queue", "serialized", "wait")

    def __init__(self, number: int, queue: tf.Tensor):
        self.number, self.queue = number, queue
        self.wait: _PendingWait | None = None
        self.serialized = np.array(tf.io.serialize_tensor(queue).numpy(), object)
        self._ticket = [np.empty(0), np.empty(0), self.serialized]
        self._renew()
        self._idle = self._references()

    def _renew(self) -> None:
        memory = aligned_empty(2 * ALIGNMENT)
        self._ticket[:2] = memory[:8].view(np.int64).reshape(()), memory[ALIGNMENT:][:4].view(np.int32).reshape(())
        self._ticket[1][...] = 1

    def _references(self) -> int:
        ticket, count, _ = self._ticket
        return sys.getrefcount(ticket) + sys.getrefcount(count) + sys.getrefcount(ticket.base)

    def begin(self, handle: Handle, execution: int) -> tuple[Arrays, _PendingWait]:
        """Start a wait; return its ticket and the wait. The graph must get the ticket's own arrays, not copies."""
        if self._references() != self._idle:
            self._renew()  # A tensor of an earlier execution still refers to the memory.
        self._ticket[0][...] = execution * _QUEUES + self.number
        self.wait = _PendingWait(self.queue, handle)
        return self._ticket.copy(), self.wait  # The list's own references keep `is_abandoned` false.

    def is_abandoned(self) -> bool:
        """Whether no node can fetch the result any more, and nothing will write to or read from the queue."""
        wait = self.wait
        assert wait is not None
        return wait.is_woken and self._references() == self._idle


class CompletionQueues:
    """The queues, and the collectives in flight that use them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # Re-entrant: a signal handler may interrupt any statement.
        self._name = f"mpistrat_completions_{next(_instances)}"
        self._slots: list[_Slot] = []  # by number
        self._free: list[_Slot] = []
        self._taken: OrderedDict[int, _Slot] = OrderedDict()  # by number
        self._element: tf.Tensor | None = None  # Creating one takes as long as enqueuing it.
        self._enqueues: dict[int, tf.types.experimental.ConcreteFunction] = {}  # by the number of queues they write to
        self._done: Arrays = []

    def prepare(self) -> None:
        """Create the first queues and the functions that write to them. Called during tracing, not in a step."""
        with self._lock:
            if self._enqueues:
                return
            with tf.init_scope(), tf.device("CPU:0"):
                self._element = tf.constant(0, tf.int64)
                self._enqueues = {count: _enqueue_to(count) for count in COMPLETION_QUEUES_WRITTEN}
            self._grow()
            self._done = [np.array(0, np.int32), self._slots[0].serialized]  # to read no elements

    def done_ticket(self, execution: int) -> Arrays:
        """Return a ticket for a complete collective: its number is negative, and the waiting node dequeues nothing."""
        return [np.array(~execution), *self._done]

    def _grow(self) -> None:
        with tf.init_scope(), SynchronousExecution(), tf.device("CPU:0"):
            for number in range(len(self._slots), len(self._slots) + COMPLETION_QUEUES_MADE):
                queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shapes=[[]], capacity=2, container="",
                                               shared_name=f"{self._name}_{number}")
                self._slots.append(_Slot(number, queue))
        self._free += self._slots[-COMPLETION_QUEUES_MADE:]

    def ticket_for(self, handle: Handle, execution: int = 0) -> Arrays:
        """Return a ticket: arrays by which a graph waits for a result. The graph must get these arrays, not copies.

        `execution`: The number, at least 0, that `execution_of` will read from the ticket.
        """
        with self._lock:
            if self._taken:
                self._reclaim(1)  # So that results which are never fetched do not stay in memory for long.
                if not self._free:
                    self._reclaim(len(self._taken))
            if not self._free:
                self._grow()
            slot = self._free.pop()
            self._taken[slot.number] = slot
            ticket, wait = slot.begin(handle, execution)
        handle.when_done(self._wake, wait)
        return ticket

    def _reclaim(self, count: int) -> None:
        """Check the `count` waits whose last check was longest ago; free the queues of those that are abandoned."""
        for _ in range(min(count, len(self._taken))):
            number, slot = next(iter(self._taken.items()))
            if not slot.is_abandoned():
                self._taken.move_to_end(number)
                continue
            del self._taken[number]
            with SynchronousExecution():
                while tf.raw_ops.QueueSizeV2(handle=slot.queue) > 0:
                    tf.raw_ops.QueueDequeueV2(handle=slot.queue, component_types=[tf.int64])
            slot.wait = None
            self._free.append(slot)

    def _wake(self, waits: list[_PendingWait]) -> None:
        queues = [wait.queue for wait in waits]
        with SynchronousExecution():
            for count in COMPLETION_QUEUES_WRITTEN:
                while len(queues) >= count:
                    _run_here(self._enqueues[count], [self._element, *queues[:count]])
                    del queues[:count]
            for queue in queues:
                tf.raw_ops.QueueEnqueueV2(handle=queue, components=[self._element], timeout_ms=-1)
        for wait in waits:
            wait.is_woken = True

    def redeem(self, ticket: int) -> Handle:
        """End the wait of the ticket with this number; return the handle of its collective."""
        with self._lock:
            slot = self._taken.pop(ticket % _QUEUES)
            wait, slot.wait = slot.wait, None
            self._free.append(slot)
        assert wait is not None
        return wait.handle


COMPLETIONS = CompletionQueues()  # for all graphs in this process


def _enqueue_to(count: int) -> tf.types.experimental.ConcreteFunction:
    """Return a function that writes an element to each of `count` queues."""
    signature = [tf.TensorSpec([], tf.int64), *[tf.TensorSpec([], tf.resource)] * count]

    @tf.function(autograph=False, input_signature=signature)
    def enqueue(element: tf.Tensor, *queues: tf.Tensor) -> None:
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[element], timeout_ms=-1)

    return enqueue.get_concrete_function()


def _run_here(function: tf.types.experimental.ConcreteFunction, inputs: list[tf.Tensor]) -> None:
    """Run a concrete function that has no results, with all of its nodes in this thread.

    A plain call would use TensorFlow's inter-op threads, and all of these may be waiting for this thread. One function
    writes to many queues, because it releases Python's lock only once. Writing to the queues one by one would cost two
    thread switches for each, 150 us, because the node that wakes up contends for the lock with this thread.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.StatefulPartitionedCall(args=inputs, Tout=[], f=function, executor_type="SINGLE_THREADED_EXECUTOR")


def execution_of(ticket: list[tf.Tensor]) -> tf.Tensor:
    """Return, as a tensor of the graph, the number of the execution that `ticket` belongs to."""
    return tf.where(ticket[0] < 0, tf.bitwise.invert(ticket[0]), ticket[0] // _QUEUES)


def awaited(ticket: list[tf.Tensor]) -> tf.Tensor:
    """Add the node that waits for the collective of `ticket`. Returns the dequeued elements, int64 zeros.

    The fetch, which is the node that returns the results, must depend on this tensor directly, by an input or a control
    dependency. TensorFlow's optimizer could remove a node between the two. The fetch also has the input ticket[0], and
    the dequeue has the input ticket[1]. These inputs keep the memory of the ticket alive until both nodes have run.
    """
    queue = tf.io.parse_tensor(ticket[2], tf.resource)
    return tf.raw_ops.QueueDequeueManyV2(handle=queue, n=ticket[1], component_types=[tf.int64])[0]
