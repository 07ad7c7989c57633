"""How fast ranks train: from the work of each, to one number and one line."""

import math

import pytest

pytest.importorskip("keras")

from mpistrat.core.slowest import Waits
from mpistrat.keras.bridge.measures import UNKNOWN, Work, line_of, speed_of


@pytest.mark.parametrize("works, speed", [
    ([Work(300, 10, 2.0), Work(100, 5, 1.0)], ("rows", 200.0)),
    ([Work(300, 10, 2.0), Work(UNKNOWN, 12, 4.0)], ("steps", 3.0)),  # A step is one of all ranks.
    ([Work(300, 10, 2.0), Work(0, 0, 0.0)], ("rows", 150.0))], ids=["rows", "unknown rows", "no steps"])
def test_the_rows_of_all_ranks_are_divided_by_the_time_of_the_slowest(
        works: list[Work], speed: tuple[str, float]) -> None:
    assert speed_of(works) == speed


@pytest.mark.parametrize("work", [Work(0, 0, 0.0), Work(0, 0, 1.0), Work(UNKNOWN, 0, 0.0)])
def test_nothing_measured_is_no_number(work: Work) -> None:
    assert math.isnan(speed_of([work, work])[1])


def test_work_of_epochs_adds_up_and_what_is_unknown_stays_so() -> None:
    assert Work(1, 2, 3.0) + Work(10, 20, 30.0) == Work(11, 22, 33.0)
    assert (Work(1, 2, 3.0) + Work(UNKNOWN, 2, 3.0)).rows == UNKNOWN
    assert (Work(UNKNOWN, 2, 3.0) + Work(2, 2, 3.0)).rows == UNKNOWN


@pytest.mark.parametrize("per_second, text", [(12345.6, "12,346"), (99.94, "99.9"), (0.01234, "0.0123")])
def test_the_line_has_three_figures_or_all_before_the_point(per_second: float, text: str) -> None:
    assert line_of("rows", per_second, [Work(1, 1, 1.0)] * 8, [""] * 8) == (
        f"mpistrat: fit has trained {text} rows per second on 8 ranks.")


@pytest.mark.parametrize("waiting, end", [
    ((4.1, 0.5), "collectives took 33% of the time on average; the slowest was rank 3 on b, for which the others "
                 "waited 36% of their time."),
    ((1.0, 0.9), "collectives took 20% of the time on average, and no rank was slower than the others."),
    ((1.0, 1.0, 1.5), "collectives took 20% of the time on average (75% of it during the backward pass), and no "
     "rank was slower than the others."),
])
def test_the_line_says_who_was_waited_for_and_how_much_was_hidden(waiting: tuple[float, ...], end: str) -> None:
    works = [Work(1, 1, 10.0, Waits(10.0, seconds, 1.0, *waiting[2:])) for seconds in waiting[:2]]
    assert line_of("rows", 100.0, works, ["rank 1 on a", "rank 3 on b"]) == (
        f"mpistrat: fit has trained 100 rows per second on 2 ranks; {end}")
