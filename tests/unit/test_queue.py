"""Hand-over between threads: Handle, Entry and TensorQueue."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from mpistrat.core.errors import DuplicateNameError, EngineError, ShutdownError
from mpistrat.core.handle import Entry, Handle, Origin, complete_all
from mpistrat.core.request import CollectiveType, Request
from mpistrat.engine.queue import TensorQueue

LONG_S = 30.0  # only a failing test waits for so long


def origin(place: str, is_in_order: bool) -> Origin:
    return Origin(lambda: place, is_in_order)


def entry(name: str, origin: Origin | None = None) -> Entry:
    return Entry(Request(CollectiveType.BARRIER, name), [], Handle(name), origin=origin)


def test_a_failure_is_a_part_of_the_next_entry_of_its_name() -> None:
    queue = TensorQueue()
    for expected in 0, 2, 0:
        queue.put(entry("a"))
        queue.put(entry("b"))
        taken = {each.request.name: each.request.failures for each in queue.take_new()}
        assert taken == {"a": expected, "b": 0}
        assert [queue.finish(name).request.failures for name in ("a", "b")] == [expected, 0]
        if not expected and not queue.completed > 2:
            queue.count_failure(["a"])
            queue.count_failure(["a"])


def test_an_entry_that_waits_behind_another_has_the_failures_that_are_left() -> None:
    queue = TensorQueue()
    queue.count_failure(["a"])
    for place in "first", "second":
        queue.put(entry("a", origin(place, True)))
    assert [each.request.failures for each in queue.take_new()] == [1]
    queue.count_failure(["a"])
    queue.finish("a")
    assert [each.request.failures for each in queue.take_new()] == [1]
    queue.finish("a")
    queue.count_failure(["a"])
    with ThreadPoolExecutor(1) as other:
        other.submit(queue.forget_failures).result()
    queue.put(entry("a"))
    assert [each.request.failures for each in queue.take_new()] == [1]
    queue.finish("a")
    queue.count_failure(["a"])
    queue.forget_failures()
    queue.put(entry("a"))
    assert [each.request.failures for each in queue.take_new()] == [0]


# -- Handle -----------------------------------------------------------------------------------------------------------


def test_a_failed_handle_raises_its_error_each_time() -> None:
    handle, error = Handle("a"), EngineError("why")
    handle.fail(error)
    assert handle.is_done
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            handle.wait()
        assert caught.value is error


def test_a_wait_that_is_too_short_names_the_tensor_and_may_be_repeated() -> None:
    handle = Handle("gradient/17")
    with pytest.raises(TimeoutError, match=r"gradient/17 is not complete after 0 s"):
        handle.wait(0)
    handle.complete([])
    assert handle.wait(0) == []


def test_a_wait_that_begins_while_the_result_comes_gets_it() -> None:
    handles = [Handle(f"{i}") for i in range(2000)]
    reached = threading.Semaphore(0)

    def complete() -> None:
        for handle in handles:
            reached.acquire()
            handle.complete([handle.name])

    threading.Thread(target=complete, daemon=True).start()
    for handle in handles:
        reached.release()
        assert handle.wait(LONG_S) == [handle.name]


@pytest.mark.parametrize("finish", [lambda h: h.complete([]), lambda h: h.fail(ValueError())], ids=["done", "failed"])
def test_callbacks_are_called_once_in_order_when_the_result_is_there(finish) -> None:  # type: ignore[no-untyped-def]
    handle = Handle("a")
    calls: list[tuple[int, bool]] = []
    for number in range(3):
        handle.when_done(lambda _, number=number: calls.append((number, handle.is_done)))  # type: ignore[misc]
    assert calls == []
    finish(handle)
    assert calls == [(0, True), (1, True), (2, True)]


def test_a_callback_may_use_the_handle() -> None:
    handle = Handle("a")
    results: list[list[np.ndarray]] = []
    handle.when_done(lambda _: handle.when_done(lambda _: results.append(handle.wait(0))))
    handle.complete([])
    assert results == [[]]


def test_handles_completed_together_share_a_call_when_all_are_done() -> None:
    handles = [Handle(name) for name in "abcd"]
    calls: list[list[Any]] = []

    def note(arguments: list[Any]) -> None:
        calls.append([*arguments, all(handle.is_done for handle in handles[:3])])

    for handle in handles:
        handle.when_done(note, handle.name)
    handles[1].when_done(lambda _: calls.append(["another"]))
    complete_all([(handle, [handle.name]) for handle in handles[:3]])
    assert calls == [["a", "b", "c", True], ["another"]]
    assert handles[2].wait(0) == ["c"] and not handles[3].is_done


def test_a_call_that_fails_keeps_no_other_from_being_made(caplog: pytest.LogCaptureFixture) -> None:
    handle = Handle("a")
    calls: list[int] = []
    handle.when_done(Mock(side_effect=ValueError("on purpose")))
    handle.when_done(lambda _: calls.append(1))
    handle.complete([])
    assert calls == [1] and handle.is_done
    assert "on purpose" in caplog.text


# -- TensorQueue ------------------------------------------------------------------------------------------------------


def test_a_name_in_flight_cannot_be_used_again() -> None:
    queue, first = TensorQueue(), entry("a")
    queue.put(first)
    with pytest.raises(DuplicateNameError, match=r"^a: .*same name as another one that is currently being processed\. "
                                                 r"Wait for the first request, or pass another name=\.$"):
        queue.put(entry("a"))
    assert queue.take_new() == [first]
    with pytest.raises(DuplicateNameError):
        queue.put(entry("a"))
    assert queue.finish("a") is first


def test_nodes_of_one_name_in_program_order_wait_for_each_other() -> None:
    queue = TensorQueue()
    first, second, third = (entry("a", origin(place, True)) for place in "bcd")
    for each in (first, second, third):
        assert not queue.put(each, is_driver=each is not first)
    assert queue.take_new() == [first] and not queue.new
    assert queue.finish("a") is first and queue.new
    assert queue.outstanding == 0
    assert queue.take_new() == [second]
    assert queue.finish("a") is second
    assert queue.take_new() == [third]
    assert queue.finish("a") is third
    assert not queue.has("a") and not queue.new


def test_a_node_that_is_in_flight_twice_is_refused() -> None:
    """Two executions of one node have no order."""
    queue = TensorQueue()
    node, other = origin("a.py:1 in step", True), origin("b.py:2 in helper", True)
    queue.put(entry("a", node))
    queue.put(entry("a", other))
    for again in (node, other):
        with pytest.raises(DuplicateNameError):
            queue.put(entry("a", again))


@pytest.mark.parametrize(("first", "second", "said"), [
    (origin("a.py:1 in f", False), origin("b.py:2 in g", False), "a.py:1 in f, the second by b.py:2 in g"),
    (origin("a.py:1 in f", True), None, "a.py:1 in f, the second by a call outside of graphs")])
def test_a_name_of_the_user_in_two_places_is_refused_with_both(first: Origin, second: Origin | None, said: str) -> None:
    queue = TensorQueue()
    queue.put(entry("a", first))
    with pytest.raises(DuplicateNameError, match=rf"another name=\. The first is submitted by {said}\.$"):
        queue.put(entry("a", second))


def test_closing_hands_out_all_that_is_in_flight_taken_or_not_or_waits_for_its_name() -> None:
    queue = TensorQueue()
    taken, new, behind = entry("a", origin("b", True)), entry("b"), entry("a", origin("c", True))
    queue.put(taken)
    assert queue.take_new() == [taken]
    queue.put(new)
    queue.put(behind)
    closed = queue.close(ShutdownError("over"))
    assert sorted(closed, key=[taken, new, behind].index) == [taken, new, behind]
    assert queue.take_new() == [] and not queue.new
    with pytest.raises(EngineError, match="a: the ranks have agreed on it, but it is not in flight"):
        queue.finish("a")


def test_a_closed_queue_refuses_with_the_error_it_was_closed_with() -> None:
    queue, error = TensorQueue(), ShutdownError("over")
    queue.close(error)
    assert queue.close(EngineError("later")) == []
    with pytest.raises(ShutdownError) as caught:
        queue.put(entry("a"))
    assert caught.value is error


def test_threads_that_give_up_leave_nothing_in_the_handle() -> None:
    handle = Handle("a")
    for _ in range(3):
        assert not handle.await_done(1e-3)
    assert not handle._waiters
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(handle.wait) for _ in range(3)]
        while len(handle._waiters) < 3:
            time.sleep(1e-3)
        handle.complete([1])
        assert [wait.result(LONG_S) for wait in waiting] == [[1]] * 3


def test_what_is_in_execution_is_returned_by_close_until_it_is_executed() -> None:
    queue, entries = TensorQueue(), [entry(name) for name in "abc"]
    for one in entries:
        queue.put(one)
    queue.take_new()
    queue.finish("a")
    queue.executed()
    queue.finish("b")
    assert queue.close(ShutdownError("over")) == entries[1:]
    assert queue.close(ShutdownError("over")) == []
