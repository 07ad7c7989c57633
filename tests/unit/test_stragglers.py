"""Which rank the others wait for, and why."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from mpistrat.trace.stragglers import ProcessorUse, Straggler, StragglerWatch, cause_of


def report(rank: int, steps: int | None, waiting: float, cores: float = 1.0, delayed: float = 0.0,
           place: str = "") -> dict[str, Any]:
    return {"rank": rank, "host": "node1", "steps": steps, "waiting": waiting, "cores": cores, "delayed": delayed,
            "place": place}


def found(intervals: Iterable[Mapping[int, Mapping[str, Any]]]) -> list[Straggler]:
    watch = StragglerWatch()
    return [each for interval in intervals if (each := watch.add(interval)) is not None]


def interval(number: int, *waiting: float, steps: int = 10) -> dict[int, dict[str, Any]]:
    """The reports of the interval with a number, in each of which the ranks do so many steps."""
    return {rank: report(rank, number * steps, share) for rank, share in enumerate(waiting)}


def test_the_rank_for_which_the_others_wait_is_named_once_and_soon() -> None:
    watch = StragglerWatch()
    named = [watch.add(interval(number, 0.3, 0.0, 0.35)) for number in range(10)]
    assert named[:2] == [None, None]  # The first interval has no steps to compare with.
    assert named[2] is not None and (named[2].rank, named[2].host) == (1, "node1")
    assert named[2].cost == pytest.approx(0.325)
    assert named[3:] == [None] * 7
    assert str(named[2]).startswith("rank 1 on node1 is slower than the others, which wait for it 32% of the time. ")


@pytest.mark.parametrize(("intervals", "why"), [
    ([interval(n, 0.09, 0.0) for n in range(9)], "it costs too little"),
    ([interval(n, *((0.4, 0.0) if n % 2 else (0.0, 0.4))) for n in range(9)], "the ranks take turns"),
    ([interval(0, 0.4, 0.0) for _ in range(9)], "no steps: a validation"),
    ([interval(n, 0.4, 0.0, steps=1) for n in range(9)], "too few steps"),
    ([interval(n, 0.4) for n in range(9)], "one rank"),
    ([{rank: report(rank, None, 0.4 * rank) for rank in range(2)} for _ in range(9)], "nobody counts steps")])
def test_no_rank_is_named_if(intervals: list[dict[int, dict[str, Any]]], why: str) -> None:
    assert found(intervals) == [], why


def test_a_rank_may_report_while_the_others_are_compared() -> None:
    class First(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            reports[2] = report(2, 0, 0.1)
            return super().__getitem__(key)

    reports: dict[int, dict[str, Any]] = {0: First(report(0, 0, 0.4)), 1: report(1, 0, 0.0)}
    assert StragglerWatch().add(reports) is None


def test_a_second_straggler_is_named_too() -> None:
    intervals = [interval(n, 0.3, 0.0) for n in range(9)] + [interval(n, 0.0, 0.3) for n in range(9, 30)]
    assert [each.rank for each in found(intervals)] == [1, 0]


def test_a_rank_that_sleeps_on_a_busy_machine_is_not_slowed_by_other_processes() -> None:
    straggler, = found({0: report(0, 10 * n, 0.94), 1: report(1, 10 * n, 0.0, cores=0.1, delayed=0.4)}
                       for n in range(9))
    assert "or a sleep" in straggler.cause


@pytest.mark.parametrize(("cores", "delayed", "cost", "words"), [
    (1.5, 0.6, 0.5, "Other processes run on its cores"), (0.2, 0.9, 0.5, "Other processes run on its cores"),
    (0.1, 0.0, 0.5, "data of the input pipeline"), (0.1, 0.4, 0.94, "data of the input pipeline"),
    (1.5, 0.0, 0.5, "It computes: it has used 1.5 cores"), (1.5, 0.4, 0.94, "It computes")])
def test_the_cause_is_what_the_rank_does(cores: float, delayed: float, cost: float, words: str) -> None:
    text = cause_of([report(0, 1, 0.0, cores, delayed, place) for place in ("", "here", "here", "there")],
                    [report(1, 1, cost)], cost)
    assert words in text and text.endswith(" Its main thread was here")


@pytest.mark.parametrize(("cores", "delayed"), [(0.2, 0.9), (0.15, 0.7)])
def test_delays_that_all_ranks_have_are_not_why_one_is_slower(cores: float, delayed: float) -> None:
    text = cause_of([report(0, 1, 0.0, cores, delayed)], [report(1, 1, 0.2, 0.2, 0.9)], 0.2)
    assert text.startswith(f"It could compute little: it has used {cores:.1f} cores")


def test_the_place_named_is_where_only_the_slow_rank_was() -> None:
    text = cause_of([report(0, 1, 0.0, place=place) for place in ("fit", "sleep", "fit", "fit", "fit")],
                    [report(1, 1, 0.2, place="fit") for _ in range(5)], 0.2)
    assert text.endswith(" Its main thread was sleep")


def test_the_use_of_the_processor_is_that_since_the_last_call() -> None:
    use = ProcessorUse()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    busy, _ = use.since_last()
    time.sleep(0.2)
    idle, delayed = use.since_last()
    assert idle < busy
    assert delayed >= 0.0
