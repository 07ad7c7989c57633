"""How the engine's thread wakes nodes of running graphs: by queues, which TensorFlow reads without holding a thread.

Every wait has a queue of its own while it lasts, and its ticket says which. One queue for all executions of a place in
a graph would not do: when an execution is given up, for an error elsewhere in its graph, its wake-up stays in the
queue, and the next execution would run on before its collective is complete.
"""

import bisect
import itertools
import threading
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from ..tensor_queue import Handle

_GROUP = 16  # queues are made in groups, and a graph captures those of all places in it as one tensor
_SPARE = 16  # beyond one per place: for iterations of a loop that TensorFlow runs at the same time
_TOGETHER = (64, 8)  # so many queues can be written to by one operation
_SLOTS = 2**16  # ticket % _SLOTS is the number of the queue


class Wakeups:
    """The queues, and which collective under way has which. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a place's end may come in the middle of anything
        self._queues: list[tf.Tensor] = []
        self._stacked: tf.Tensor | None = None
        self._free: list[int] = []  # sorted
        self._taken: dict[int, Handle] = {}  # by ticket, the oldest first
        self._numbers = itertools.count()
        self._places = 0
        self._element: tf.Tensor | None = None  # to make one takes as long as to enqueue it
        self._enqueues: dict[int, Any] = {}  # by how many queues they write to

    def queues_for(self, place: Any) -> tf.Tensor:
        """Handles of as many queues as are enough with one more place in a graph, for that graph to capture.

        At any time one collective of each place is incomplete at most, since its name is the same every time. A place
        takes the highest free queue that it has captured, so that places captured earlier find a lower one.
        """
        with self._lock:
            self._places += 1
            weakref.finalize(place, self._forget_place)
            while len(self._queues) < self._places + _SPARE:
                self._grow()
            return self._stacked

    def _forget_place(self) -> None:
        with self._lock:
            self._places -= 1

    def _grow(self) -> None:
        first = len(self._queues)
        with tf.init_scope(), tf.device("CPU:0"):
            self._element = tf.constant(0, tf.int64)
            self._queues += [tf.raw_ops.FIFOQueueV2(component_types=[tf.int64], shapes=[[]], capacity=2, container="",
                                                    shared_name=f"mpistrat_wakeup_{slot}")
                             for slot in range(first, first + _GROUP)]
            self._stacked = tf.stack(self._queues)
        self._free += range(first, first + _GROUP)
        for count in _TOGETHER:
            if count <= len(self._queues) and count not in self._enqueues:
                self._enqueues[count] = _enqueue_to(count)

    def ticket_for(self, handle: Handle, queues: int) -> int:
        """A ticket that stands for `handle` until `redeem`, with one of the first `queues` queues."""
        with self._lock:
            position = bisect.bisect_left(self._free, queues) - 1
            slot = self._free.pop(position) if position >= 0 else self._reclaim(queues)
            ticket = next(self._numbers) * _SLOTS + slot
            self._taken[ticket] = handle
        handle.when_done(self._wake, slot)
        return ticket

    def _reclaim(self, queues: int) -> int:
        """The queue of the oldest complete collective: its execution was given up, or has no use for the result."""
        for ticket, handle in self._taken.items():
            slot = ticket % _SLOTS
            if slot < queues and handle.done():
                del self._taken[ticket]
                while tf.raw_ops.QueueSizeV2(handle=self._queues[slot]) > 0:
                    tf.raw_ops.QueueDequeueV2(handle=self._queues[slot], component_types=[tf.int64])
                return slot
        raise AssertionError(f"{queues} queues are not enough for the collectives under way")

    def _wake(self, slots: list[int]) -> None:
        queues = [self._queues[slot] for slot in slots]
        for count in _TOGETHER:
            while len(queues) >= count:
                _run_here(self._enqueues[count], [self._element, *queues[:count]])
                del queues[:count]
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[self._element], timeout_ms=-1)

    def redeem(self, ticket: int) -> Handle:
        """The handle that the ticket stands for, once its wait is over."""
        with self._lock:
            handle = self._taken.pop(ticket)
            bisect.insort(self._free, ticket % _SLOTS)
        return handle


WAKEUPS = Wakeups()  # of all graphs in this process


def _enqueue_to(count: int) -> Any:
    """A function that writes an element to so many queues."""
    signature = [tf.TensorSpec([], tf.int64), *[tf.TensorSpec([], tf.resource)] * count]

    @tf.function(autograph=False, input_signature=signature)
    def enqueue(element: tf.Tensor, *queues: tf.Tensor) -> None:
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[element], timeout_ms=-1)

    with tf.init_scope(), tf.device("CPU:0"):
        return enqueue.get_concrete_function()


def _run_here(function: Any, inputs: list[tf.Tensor]) -> None:
    """Run a concrete function without results in this thread alone.

    A call of the function would hand its nodes to the inter-op threads, and all of those may be waiting for what this
    thread is about to do. Python's lock is free meanwhile, so that what is awakened runs at the same time; awakened one
    by one, each takes two changes of threads, 150 us, for both sides want that lock again and again.
    """
    with tf.device("CPU:0"):
        tf.raw_ops.StatefulPartitionedCall(args=inputs, Tout=[], f=function, executor_type="SINGLE_THREADED_EXECUTOR")


def awaited(ticket: tf.Tensor, queues: tf.Tensor) -> tf.Tensor:
    """In a graph: `ticket`, once its collective is complete."""
    queue = tf.gather(seen_from_here(queues), ticket % _SLOTS)
    done = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    with tf.control_dependencies(done):
        return tf.identity(ticket)


def seen_from_here(resource: tf.Tensor) -> tf.Tensor:
    """The resource as a tensor of the function around this graph: the gradient of a loop can capture no other."""
    graph = tf.compat.v1.get_default_graph()
    if not isinstance(graph, ControlFlowFuncGraph):
        return resource
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph.capture(resource)
