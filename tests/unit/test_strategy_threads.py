"""What the ranks agree on about a thread, and which two threads they cannot tell apart."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mpistrat.core.errors import InvalidRequestError

pytest.importorskip("tensorflow")

from mpistrat.tensorflow.distribute import threads


def name_in(action: Callable[[], str] = lambda: threads.wire_name("reduce"), **arguments: Any) -> str:
    """What `action` returns in a new thread."""
    found: list[str] = []

    def evaluate() -> None:
        found.append(action())

    thread = threading.Thread(target=evaluate, **arguments)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("name", "kind"), [
    ("Thread-12", "Thread"), ("Thread-3 (train)", "Thread (train)"), ("Dummy-5", "Dummy"),
    ("ThreadPoolExecutor-0_1", "ThreadPoolExecutor"), ("readers_3", "readers"), ("asyncio_0", "asyncio"),
    ("evaluation", "evaluation"), ("reader-1", "reader-1"), ("Thread-like", "Thread-like")])
def test_the_numbers_that_python_gives_are_left_out(name: str, kind: str) -> None:
    assert threads.kind_of(name) == kind


def test_the_main_thread_has_the_plain_names() -> None:
    assert threads.wire_name("reduce") == "strategy/reduce"


def test_a_thread_has_the_name_that_it_was_given_or_that_of_its_function() -> None:
    assert name_in(name="evaluation") == "strategy/evaluation/reduce"
    assert name_in() == name_in() == "strategy/Thread (evaluate)/reduce"


def test_a_name_space_takes_the_place_of_the_threads_own() -> None:
    def within() -> str:
        with threads.name_space("checkpoint1"):
            return threads.wire_name("files")
    assert name_in(within, name="evaluation") == "strategy/checkpoint1/files"
    assert within() == "strategy/checkpoint1/files"


@pytest.mark.parametrize("name", [None, "same"])
def test_two_living_threads_of_one_kind_are_refused(name: str | None) -> None:
    both, outcomes = threading.Barrier(2), []

    def evaluate() -> None:
        both.wait(60)
        try:
            outcomes.append(threads.wire_name("reduce"))
        except InvalidRequestError as error:
            outcomes.append(str(error))
        both.wait(60)

    started = [threading.Thread(target=evaluate, name=name) for _ in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert all("are both alive" in text and "name='evaluation'" in text for text in outcomes) and len(outcomes) == 2


def test_an_executor_of_one_thread_is_one_thread() -> None:
    with ThreadPoolExecutor(1) as executor:
        names = {executor.submit(threads.wire_name, "reduce").result() for _ in range(5)}
    assert names == {"strategy/ThreadPoolExecutor/reduce"}
