"""Nodes of running graphs are woken one by one and many at a time, whatever TensorFlow's threads wait for."""

import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from mpistrat.core.handle import Handle, complete_all  # noqa: E402
from mpistrat.tensorflow.bridge.completion import (  # noqa: E402
    COMPLETIONS,
    TICKET,
    CompletionQueues,
    awaited,
    execution_of,
)
from mpistrat.tensorflow.bridge.python_op import host_call  # noqa: E402
from mpistrat.tensorflow.graph.cpu import scalars  # noqa: E402

LONG_S = 60


def _after(ticket: list[Any]) -> Any:
    """In a graph: the first part of the ticket, as a tensor of its own, when the collective is complete."""
    return ticket[0] + awaited(ticket)[0]


class _Waiting:
    """A graph with so many waits, and a run of it in a thread."""

    def __init__(self, count: int):
        COMPLETIONS.prepare()
        self.handles = [Handle(str(i)) for i in range(count)]
        tickets = [COMPLETIONS.ticket_for(handle) for handle in self.handles]

        @tf.function(autograph=False)
        def wait() -> Any:
            waits = [host_call(lambda ticket=ticket: ticket, [], TICKET, stateful=True) for ticket in tickets]
            return tf.stack([_after(ticket) for ticket in map(scalars, waits)])

        self.result: list[int] = []
        self.tickets = [int(ticket[0]) for ticket in tickets]
        self._thread = threading.Thread(target=lambda: self.result.extend(wait().numpy()), daemon=True)
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
    assert [COMPLETIONS.redeem(ticket).wait(0) for ticket in waiting.tickets] == [[h.name] for h in waiting.handles]


class _Result:
    """Stands for an array."""


class _Program:
    """A graph that begins a wait each time, and the handles of its collectives, which are complete if asked for."""

    def __init__(self, completions: CompletionQueues, use: Any, complete: bool = True):
        completions.prepare()
        self.handles: list[Handle] = []

        def submit() -> list[Any]:
            self.handles.append(Handle("one"))
            ticket = completions.ticket_for(self.handles[-1])
            if complete:
                self.handles[-1].complete([_Result()])
            return ticket

        self.run = tf.function(lambda: use(scalars(host_call(submit, [], TICKET, stateful=True))), autograph=False)


def test_results_that_nobody_fetches_are_given_up_and_their_queues_used_again() -> None:
    completions = CompletionQueues()
    program = _Program(completions, _after)
    for _ in range(500):
        program.run()
    assert len(completions._slots) == 16
    assert len(completions._taken) <= 2
    results = [weakref.ref(handle.wait(0)[0]) for handle in program.handles]
    program.handles.clear()
    assert sum(result() is not None for result in results) <= 2


def test_a_wait_that_was_given_up_leaves_no_wake_up_to_the_next() -> None:
    """Its execution ended by an error before its dequeue, and its collective completes later than that."""
    completions = CompletionQueues()

    def fail(*_: Any) -> list[Any]:
        raise ValueError("elsewhere")

    def never(ticket: list[Any]) -> Any:
        after, = host_call(fail, [ticket[0]], [tf.int64], stateful=True)
        with tf.control_dependencies([after]):
            return _after([tf.identity(part) for part in ticket])

    given_up = _Program(completions, never, complete=False)
    for _ in range(40):
        with pytest.raises(tf.errors.InvalidArgumentError, match="elsewhere"):
            given_up.run()
    for handle in given_up.handles:
        handle.complete([])
    program = _Program(completions, _after, complete=False)
    for _ in range(100):
        count = len(program.handles)
        thread = threading.Thread(target=program.run)
        thread.start()
        while len(program.handles) == count:
            thread.join(0.001)
        assert thread.is_alive()  # It waits for this collective, and not for one before.
        program.handles[-1].complete([])
        thread.join(LONG_S)
        assert not thread.is_alive()
    assert len(completions._slots) <= 64


def test_a_result_is_kept_while_a_tensor_of_its_execution_is_there() -> None:
    completions = CompletionQueues()
    program = _Program(completions, lambda ticket: (awaited(ticket), ticket[0])[1])
    tickets = [program.run() for _ in range(100)]
    assert [completions.redeem(int(ticket)) for ticket in tickets] == program.handles
    assert len(completions._slots) >= 100
    del tickets
    for _ in range(100):
        completions.redeem(int(program.run()))
    assert len(completions._slots) <= 128


@pytest.mark.parametrize("execution", [0, 1, 12_345_678])
def test_a_ticket_has_the_number_of_the_execution(execution: int) -> None:
    completions = CompletionQueues()
    completions.prepare()
    for ticket, awaited_elements in [(completions.ticket_for(Handle("a"), execution), 1),
                                     (completions.done_ticket(execution), 0)]:
        tensors = [tf.constant(part) for part in ticket[:1]]
        assert (int(execution_of(tensors)), int(ticket[1])) == (execution, awaited_elements)


def test_a_complete_collective_is_not_awaited() -> None:
    completions = CompletionQueues()
    completions.prepare()
    tickets = [completions.ticket_for(Handle(str(i))) for i in range(16)]  # All queues are in use, and empty.
    done = completions.done_ticket(7)
    assert done[2].item() in [ticket[2].item() for ticket in tickets]
    assert awaited([tf.constant(part) for part in (*done[:2], done[2].item())]).shape == (0,)


@pytest.mark.nightly
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
