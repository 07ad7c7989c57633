"""How long tests may take: the budget of the first level, shares of about the same length, what a run writes."""

import re

import pytest

from ..durations import FILE, Durations

TEXT = """# a comment
budget 30
   10.0     0.0 tests/unit/test_a.py
    5.0    60.0 tests/jobs/test_b.py::test_c[1]
    0.0    70.0 tests/programs/test_c.py
"""
DURATIONS = Durations.read(TEXT)


def test_the_file_reads_as_it_was_written() -> None:
    assert Durations.read(DURATIONS.written()) == DURATIONS
    assert Durations.read(FILE.read_text()).budget_s > 0


@pytest.mark.parametrize(("text", "said"), [
    ("10.0 0.0 tests/unit/test_a.py", 'has no line "budget SECONDS"'),
    ("budget 3\n10.0 tests/unit/test_a.py", r"'10.0 tests/unit/test_a.py' is not .* pytest --write-durations$")])
def test_a_file_that_cannot_be_read_is_an_error(text: str, said: str) -> None:
    with pytest.raises(pytest.UsageError, match=said):
        Durations.read(text)


def test_a_first_level_beyond_the_budget_is_refused_with_the_slowest_first() -> None:
    units = [*DURATIONS.units, *DURATIONS.units]  # Each test names its unit.
    assert DURATIONS.problem(units) is None
    problem = Durations(14.0, DURATIONS.units).problem(units)
    assert problem is not None and re.search(r"takes 15 s .* may take 14 s .*\n +10\.0 .*a\.py\n +5\.0 ", problem)


def test_a_unit_without_a_duration_is_refused_with_the_command_that_measures_it() -> None:
    problem = DURATIONS.problem([*DURATIONS.units, "tests/unit/test_new.py"])
    assert problem is not None and problem.endswith("pytest --write-durations tests/unit/test_new.py")


def test_shares_are_of_about_the_same_length_and_have_every_unit_once() -> None:
    shares = [DURATIONS.share(DURATIONS.units, f"{number}/2") for number in (1, 2)]
    assert shares == [{"tests/programs/test_c.py"}, {"tests/jobs/test_b.py::test_c[1]", "tests/unit/test_a.py"}]
    assert DURATIONS.share(DURATIONS.units, "1/1") == set(DURATIONS.units)


@pytest.mark.parametrize("words", ["0/3", "4/3", "1", "one/three", "1/0"])
def test_a_share_that_does_not_exist_is_an_error(words: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"^--share {words}: there is no such share; write 1/3"):
        DURATIONS.share(DURATIONS.units, words)


def test_a_run_replaces_the_levels_that_it_has_measured_and_forgets_what_is_gone() -> None:
    old, new = "tests/jobs/test_b.py::test_c[1]", "tests/unit/test_new.py"
    updated = DURATIONS.updated({old: (None, 61.04), new: (1.0, None)}, there=[old, new])
    assert updated.units == {old: (5.0, 61.0), new: (1.0, 0.0)}
