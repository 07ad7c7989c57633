"""Names of collectives: what they have of a thread, a function and an optimizer, whatever a process has traced."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mpistrat.core.errors import InvalidRequestError

tf = pytest.importorskip("tensorflow")

from mpistrat.tensorflow.bridge import names  # noqa: E402

# -- functions --------------------------------------------------------------------------------------------------------


def test_a_name_has_the_function_and_the_number_in_it_whatever_was_traced_before() -> None:
    found: list[str] = []

    def named(x: Any) -> Any:
        found.append(names.made("allreduce"))
        return x

    @tf.function(autograph=False)
    def inner(x: Any) -> Any:
        return named(x)

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        named(x)
        tf.cond(x > 0, lambda: named(x), lambda: named(x))
        tf.while_loop(lambda i: i < x, lambda i: named(i) + 1, [tf.zeros_like(x)])
        return named(inner(x))

    inner(tf.constant(1))  # Only some processes do this.
    inner(tf.constant(1.0))
    assert found == ["inner()/allreduce"] * 2
    for value, inner_is_new in (1, False), (1.0, False), (tf.int64.max, True):
        found.clear()
        step.get_concrete_function(tf.constant(value))
        numbered = ["step()/allreduce", *(f"step()/allreduce_{number}" for number in range(1, 5))]
        assert found == [*numbered[:4], *["inner()/allreduce"] * inner_is_new, numbered[4]]
    assert named(0) == 0 and found[-1] == "allreduce"


def test_a_gradient_has_the_name_of_its_collective_and_a_number_in_its_function() -> None:
    found: list[str] = []

    @tf.custom_gradient
    def identity(x: Any) -> Any:
        name = names.made("allreduce")

        def gradient(upstream: Any) -> Any:
            found.extend([names.of_gradient(name, 0), names.of_gradient(name, 0), names.made("allreduce")])
            return upstream
        return x, gradient

    step = tf.function(lambda x: identity(x), autograph=False)
    for number in range(2):  # TensorFlow numbers the graphs of gradients.
        x = tf.ones([number + 1])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = step(x)
        tape.gradient(y, x)
        assert found == ["<lambda>()/allreduce/gradient", "<lambda>()/allreduce/gradient_1",
                         "gradient of <lambda>()/allreduce"]
        assert [names.is_in_order(name) for name in found] == [True, True, False]
        found.clear()


def test_ranks_of_a_process_set_count_its_collectives_apart() -> None:
    found: list[str] = []

    @tf.function(autograph=False)
    def step(x: Any, member: bool) -> Any:
        sets = [0, 5, 5, 0] if member else [0, 0]
        found.extend(names.made("tape", process_set) for process_set in sets)
        found.extend(names.of_gradient("loss", process_set) for process_set in sets)
        return x

    step(1, True)
    assert found[:4] == ["step()/tape", "step()/tape", "step()/tape_1", "step()/tape_1"]
    assert found[4:] == ["loss/gradient", "loss/gradient", "loss/gradient_1", "loss/gradient_1"]
    found.clear()
    step(1, False)
    assert found == ["step()/tape", "step()/tape_1", "loss/gradient", "loss/gradient_1"]


def test_names_of_users_stay_as_they_are() -> None:
    found: list[str] = []

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        with tf.name_scope("scope"):
            found.extend([names.given("loss", False), names.given("loss", False), names.given("a loss", True)])
        return x

    step(1)
    assert found == ["scope/loss", "scope/loss_1", "a_loss"]
    assert names.given("a loss", False) == "a loss"
    assert not any(map(names.is_in_order, found)) and names.is_in_order("step()/allreduce")


# -- optimizers -------------------------------------------------------------------------------------------------------


def test_optimizers_have_numbers_in_the_order_in_which_they_were_made_without_those_that_are_gone() -> None:
    group = 10**6  # a process set that no other test uses
    gone, first, second = (names.OptimizerName(group) for _ in range(3))
    gone.itself = gone  # type: ignore[attr-defined]
    assert gone.place < first.place < second.place
    del gone
    assert name_in(second) == "optimizer2"
    assert (first(), second()) == ("optimizer1", "optimizer2")
    assert names.OptimizerName(group)() == "optimizer3"
    assert names.OptimizerName(group + 1)() == "optimizer1"


def test_a_thread_that_makes_optimizers_gives_them_its_name() -> None:
    assert [name_in(lambda: names.OptimizerName(10**7)(), name="member") for _ in range(2)] == [
        "member/optimizer1", "member/optimizer2"]


# -- threads ----------------------------------------------------------------------------------------------------------


def name_in(action: Callable[[], str] = lambda: names.eager("reduce"), **arguments: Any) -> str:
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
    assert names.kind_of(name) == kind


def test_a_thread_has_the_name_that_it_was_given_or_that_of_its_function() -> None:
    assert name_in(name="evaluation") == "evaluation/reduce"
    assert name_in() == name_in() == "Thread (evaluate)/reduce"
    assert names.eager("reduce") == "reduce"


def test_a_name_space_takes_the_place_of_the_threads_own() -> None:
    def within() -> str:
        with names.name_space("checkpoint1"):
            return names.eager("files")
    assert name_in(within, name="evaluation") == "checkpoint1/files"
    assert within() == "checkpoint1/files"


@pytest.mark.parametrize("name", [None, "same"])
def test_two_living_threads_of_one_kind_are_refused(name: str | None) -> None:
    both, outcomes = threading.Barrier(2), []

    def evaluate() -> None:
        both.wait(60)
        try:
            outcomes.append(names.eager("reduce"))
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
        found = {executor.submit(names.eager, "reduce").result() for _ in range(5)}
    assert found == {"ThreadPoolExecutor/reduce"}
