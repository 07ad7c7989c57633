"""Nodes of running graphs are woken one by one and many at a time, whatever TensorFlow's threads wait for."""

import subprocess
import sys
import threading
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.tensor_queue import Handle, complete_all  # noqa: E402
from mpistrat.tensorflow.wakeups import WAKEUPS, awaited  # noqa: E402

LONG_S = 60


class _Place:
    """Stands for a place in a graph."""


class _Waiting:
    """A graph with so many waits, and a run of it in a thread."""

    def __init__(self, count: int):
        self.places = [_Place() for _ in range(count)]
        queues = [WAKEUPS.queues_for(place) for place in self.places]
        self.handles = [Handle(str(i)) for i in range(count)]
        tickets = [WAKEUPS.ticket_for(handle, int(captured.shape[0]))
                   for handle, captured in zip(self.handles, queues)]

        @tf.function(autograph=False)
        def wait(tickets: Any) -> Any:
            return tf.stack([awaited(tickets[i], captured) for i, captured in enumerate(queues)])

        self.result: list[int] = []
        self.tickets = tickets
        self._thread = threading.Thread(target=lambda: self.result.extend(wait(tf.constant(tickets)).numpy()),
                                        daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


@pytest.mark.parametrize("count", [1, 7, 8, 20, 64, 75, 137])
def test_all_that_is_complete_is_woken_and_nothing_else(count: int) -> None:
    waiting = _Waiting(count)
    *others, last = waiting.handles
    complete_all([(handle, [handle.name]) for handle in others])
    assert not waiting.ended(0.05)
    last.complete([last.name])
    assert waiting.ended(LONG_S)
    assert waiting.result == waiting.tickets
    assert [WAKEUPS.redeem(ticket).wait(0) for ticket in waiting.tickets] == [[h.name] for h in waiting.handles]


def test_they_are_woken_while_all_threads_of_tensorflow_wait() -> None:
    ran = subprocess.run([sys.executable, "-c", f"from {__name__} import wake_with_no_thread_left as w; w()"],
                         timeout=LONG_S, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.strip() == "woken", ran.stderr


def wake_with_no_thread_left() -> None:
    """In a process of its own: TensorFlow's only inter-op thread waits for what comes after the wake-up."""
    tf.config.threading.set_inter_op_parallelism_threads(1)
    waiting = _Waiting(80)
    begun, over = threading.Event(), threading.Event()

    @tf.function(autograph=False)
    def block() -> Any:
        return tf.numpy_function(lambda: begun.set() or over.wait(), [], tf.bool)

    blocking = threading.Thread(target=block)
    blocking.start()
    assert begun.wait(LONG_S)
    complete_all([(handle, []) for handle in waiting.handles])
    over.set()
    blocking.join()
    assert waiting.ended(LONG_S)
    print("woken")
