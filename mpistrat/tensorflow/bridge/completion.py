"""How the engine's thread wakes nodes of running graphs: by queues, which TensorFlow reads without holding a thread.

Every wait has a queue of its own while it lasts. One queue for all executions of a call site would not do: when an
execution is given up, for an error elsewhere in its graph, its wake-up stays in the queue, and the next execution would
run on before its collective is complete.

A graph captures no queue. The callback that begins a wait returns its ticket, in which the queue's handle is a string.
So the gradient of a branch or of a loop, which can capture nothing, may wait like any other graph, and there are as
many queues as collectives were ever under way at the same time.

A wait is over when its result is fetched. Some results are never fetched: the execution was given up, or has no use for
them. That is seen from the references to the ticket's memory, which TensorFlow does not copy. While there is one, a
node may still read the ticket or the queue.
"""

import itertools
import sys
import threading
from collections import OrderedDict
from contextlib import ExitStack
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.handle import Handle
from ...core.memory import ALIGNMENT, aligned_empty
from ...core.tuning import COMPLETION_QUEUES_MADE, COMPLETION_QUEUES_WRITTEN
from .own_executor import at_once

# A ticket: the number of the execution and that of the queue, packed; how many elements to read from the queue (one);
# and the queue's handle.
TICKET = (tf.int64, tf.int32, tf.string)
_QUEUES = 2**20  # no more than these

_instances = itertools.count()


class _Wait:
    """From a ticket to the fetch of the result.

    Attributes:
        queue: What is written to when the collective is complete.
        handle: The collective; None until it is known.
        is_woken: The queue has been written to.
    """

    __slots__ = ("handle", "is_woken", "queue")

    def __init__(self, queue: tf.Tensor):
        self.queue = queue
        self.handle: Handle | None = None
        self.is_woken = False


class _Slot:
    """A queue, for one wait after another."""

    __slots__ = ("_idle", "_ticket", "number", "queue", "serialized", "wait")

    def __init__(self, number: int, queue: tf.Tensor):
        self.number, self.queue = number, queue
        self.wait: _Wait | None = None
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

    def begin(self, execution: int) -> list[np.ndarray]:
        """The ticket of a wait that begins. TensorFlow must get these very arrays."""
        if self._references() != self._idle:
            self._renew()  # A tensor of an earlier execution is still there.
        self._ticket[0][...] = execution * _QUEUES + self.number
        self.wait = _Wait(self.queue)
        return self._ticket.copy()  # with references of its own, so that the wait is not taken for one that is left

    def is_left(self) -> bool:
        """Whether nobody can fetch the result, and nothing will be written to the queue or read from it any more."""
        wait = self.wait
        assert wait is not None
        return (wait.is_woken or wait.handle is None) and self._references() == self._idle


class CompletionQueues:
    """The queues, and which collective under way has which. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may come in the middle of anything
        self._name = f"mpistrat_wakeup_{next(_instances)}"
        self._slots: list[_Slot] = []  # by number
        self._free: list[_Slot] = []
        self._taken: OrderedDict[int, _Slot] = OrderedDict()  # by number
        self._element: tf.Tensor | None = None  # to make one takes as long as to enqueue it
        self._enqueues: dict[int, Any] = {}  # by how many queues they write to
        self._done: list[np.ndarray] = []

    def prepare(self) -> None:
        """Make what all waits have in common, while a graph is traced, so that its execution need not."""
        with self._lock:
            if self._enqueues:
                return
            with tf.init_scope(), tf.device("CPU:0"):
                self._element = tf.constant(0, tf.int64)
                self._enqueues = {count: _enqueue_to(count) for count in COMPLETION_QUEUES_WRITTEN}
            self._grow()
            self._done = [np.array(0, np.int32), self._slots[0].serialized]

    def done_ticket(self, execution: int) -> list[np.ndarray]:
        """In place of a ticket, where there is nothing to wait for. Its queue is not read."""
        return [np.array(~execution), *self._done]

    def _grow(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(tf.init_scope())
            stack.enter_context(at_once())
            stack.enter_context(tf.device("CPU:0"))
            for number in range(len(self._slots), len(self._slots) + COMPLETION_QUEUES_MADE):
                queue = tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shapes=[[]], capacity=2, container="",
                                               shared_name=f"{self._name}_{number}")
                self._slots.append(_Slot(number, queue))
        self._free += self._slots[-COMPLETION_QUEUES_MADE:]

    def ticket_for(self, handle: Handle, execution: int = 0) -> list[np.ndarray]:
        """A ticket for the result of a collective. TensorFlow must get these very arrays.

        Args:
            handle: Of the collective.
            execution: What `execution_of` finds in the ticket, 0 or above.
        """
        with self._lock:
            slot = self._take()
            ticket = slot.begin(execution)
        self._attach(slot, handle)
        return ticket

    def open_ticket(self, execution: int = 0) -> list[np.ndarray]:
        """As `ticket_for`, for a collective that will be attached to the ticket."""
        with self._lock:
            return self._take().begin(execution)

    def attach(self, ticket: int, handle: Handle) -> None:
        """Let the wait of an open ticket end when this collective is complete."""
        self._attach(self._slots[ticket % _QUEUES], handle)

    def _attach(self, slot: _Slot, handle: Handle) -> None:
        wait = slot.wait
        assert wait is not None and wait.handle is None
        wait.handle = handle
        handle.when_done(self._wake, wait)

    def _take(self) -> _Slot:
        """A free slot, for a wait that begins."""
        if self._taken:
            self._reclaim(1)  # so that results that nobody fetches do not stay for long
            if not self._free:
                self._reclaim(len(self._taken))
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._taken[slot.number] = slot
        return slot

    def _reclaim(self, count: int) -> None:
        """Look at the waits that began the longest ago, or were looked at the longest ago; take back those left."""
        for _ in range(min(count, len(self._taken))):
            number, slot = next(iter(self._taken.items()))
            if not slot.is_left():
                self._taken.move_to_end(number)
                continue
            del self._taken[number]
            with at_once():
                while tf.raw_ops.QueueSizeV2(handle=slot.queue) > 0:
                    tf.raw_ops.QueueDequeueV2(handle=slot.queue, component_types=[tf.int64])
            self._release(slot)

    def _release(self, slot: _Slot) -> None:
        slot.wait = None
        self._free.append(slot)

    def _wake(self, waits: list[_Wait]) -> None:
        queues = [wait.queue for wait in waits]
        with at_once():
            for count in COMPLETION_QUEUES_WRITTEN:
                while len(queues) >= count:
                    _run_here(self._enqueues[count], [self._element, *queues[:count]])
                    del queues[:count]
            for queue in queues:
                tf.raw_ops.QueueEnqueueV2(handle=queue, components=[self._element], timeout_ms=-1)
        for wait in waits:
            wait.is_woken = True

    def redeem(self, ticket: int) -> Handle:
        """The handle of the collective whose wait is over."""
        with self._lock:
            slot = self._taken.pop(ticket % _QUEUES)
            wait = slot.wait
            self._release(slot)
        assert wait is not None and wait.handle is not None
        return wait.handle


COMPLETIONS = CompletionQueues()  # of all graphs in this process


def _enqueue_to(count: int) -> Any:
    """A function that writes an element to so many queues."""
    signature = [tf.TensorSpec([], tf.int64), *[tf.TensorSpec([], tf.resource)] * count]

    @tf.function(autograph=False, input_signature=signature)
    def enqueue(element: tf.Tensor, *queues: tf.Tensor) -> None:
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[element], timeout_ms=-1)

    return enqueue.get_concrete_function()


def _run_here(function: Any, inputs: list[tf.Tensor]) -> None:
    """Run a concrete function without results in this thread alone.

    A call of the function would hand its nodes to the inter-op threads, and all of those may be waiting for what this
    thread is about to do. Python's lock is free meanwhile, so that what is awakened runs at the same time; awakened one
    by one, each takes two changes of threads, 150 us, for both sides want that lock again and again.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.StatefulPartitionedCall(args=inputs, Tout=[], f=function, executor_type="SINGLE_THREADED_EXECUTOR")


def is_done(ticket: list[tf.Tensor]) -> tf.Tensor:
    """In a graph: whether there is nothing to wait for."""
    return ticket[0] < 0


def execution_of(ticket: list[tf.Tensor]) -> tf.Tensor:
    """In a graph: the number of the execution."""
    return tf.where(is_done(ticket), tf.bitwise.invert(ticket[0]), ticket[0] // _QUEUES)


def queue_of(ticket: list[tf.Tensor]) -> tf.Tensor:
    """In a graph: the queue's handle.

    A branch that waits must get it from outside. TensorFlow executes what is stateful in the order of the program, and
    so would start nothing more until the branch is done, unless the branch has a resource of its own for an input.
    """
    return tf.io.parse_tensor(ticket[2], tf.resource)


def awaited(ticket: list[tf.Tensor], queue: tf.Tensor) -> tf.Tensor:
    """In a graph: the first part of the ticket, once its collective is complete.

    Args:
        ticket: Scalars, what a callback returned. The dequeue takes the count from there, and not a constant, since an
            input lives as long as the node: where nobody fetches the result nothing else would hold the ticket's
            memory.
        queue: Its queue.
    """
    done = tf.raw_ops.QueueDequeueManyV2(handle=queue, n=ticket[1], component_types=[tf.int64])
    with tf.control_dependencies(done):
        return tf.identity(ticket[0])
