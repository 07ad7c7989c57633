"""The examples of single features: each as its user starts it, and what its last line says."""

import re
from collections.abc import Callable

import pytest

from ..support.jobs import needs_mpirun
from ..support.scripts import Line, Ran


def last_line(ran: Ran, pattern: str) -> re.Match[str]:
    """The last line that an example has printed, which the chief does."""
    lines = [line for line in ran.well.splitlines() if line.startswith("test accuracy ")]
    assert len(lines) == 1, ran
    match = re.fullmatch(pattern, lines[0])
    assert match is not None, lines
    return match


@needs_mpirun
@pytest.mark.parametrize("needed", [Line(ranks, "examples/adasum_digits.py") for ranks in (1, 2, 3)], ids=str)
def test_adasum_learns_the_same_on_all_ranks(needed: Line, ran: Callable[[Line], Ran]) -> None:
    line = last_line(ran(needed), rf"test accuracy (\d\.\d+) with adasum, weights (\w+), "
                                  rf"the same on all ranks \({needed.ranks}\)")
    assert float(line[1]) >= 0.93, line[0]


@pytest.mark.nightly
@needs_mpirun
@pytest.mark.parametrize("needed", [tuple(
    Line(2, f"examples/adasum_digits.py --op {op} --epochs 1") for op in ("adasum", "average"))], ids=["both"])
def test_adasum_is_not_the_average(needed: tuple[Line, ...], ran: Callable[[Line], Ran]) -> None:
    pattern = r"test accuracy (\d\.\d+) with \w+, weights (\w+), the same on all ranks \(2\)"
    adasum, average = (last_line(ran(line), pattern) for line in needed)
    assert adasum[2] != average[2]


@needs_mpirun
@pytest.mark.parametrize("needed", [Line(ranks, "examples/process_sets.py") for ranks in (2, 3)], ids=str)
def test_process_sets_train_two_models(needed: Line, ran: Callable[[Line], Ran]) -> None:
    ranks = needed.ranks
    line = last_line(ran(needed), rf"test accuracy (\d\.\d+) and (\d\.\d+) of the models on {ranks // 2} and "
                                  rf"{ranks - ranks // 2} ranks, (\d\.\d+) together")
    assert min(float(line[number]) for number in (1, 2, 3)) >= 0.9, line[0]
    assert line[1] != line[2]


@pytest.mark.nightly
@pytest.mark.parametrize("needed", [Line(1, "examples/process_sets.py")], ids=str)
def test_process_sets_on_one_rank_say_what_they_need(needed: Line, ran: Callable[[Line], Ran]) -> None:
    error, = ran(needed).error
    assert error.startswith("Two models need two ranks or more: mpirun -np 2"), error
