"""Figures that the pages name: docs/figures.json has each, programs write the file, and no page says another number."""

import json
import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
figures = runpy.run_path(str(DOCS / "figures.py"))
FILE = json.loads((DOCS / "figures.json").read_text())
FIGURES = {**FILE["computed"], **{phrase: once["figure"] for phrase, once in FILE["once"].items()}}
WRITE = "python docs/figures.py"
# A number of these must stand in a phrase of the file.
COUNTED = re.compile(r"(\d[\d,.]*|\b(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|fifteen|twenty|thirty))"
                     r"\s+(?:minutes|tests|features)\b")
# What is a default of a setting may stand on several pages; of what a program has measured other pages link to it.
REPEATED = re.compile("after|3")


def test_the_file_is_as_the_programs_that_measure_have_left_it() -> None:
    assert FILE["computed"] == figures["computed"](), WRITE


def problems(texts: dict[str, str]) -> list[str]:
    """What pages, by name, say that the file does not."""
    found: list[str] = []
    pages_of: dict[str, set[str]] = {phrase: set() for phrase in FIGURES}
    for name, text in texts.items():
        spans = []
        for phrase, figure in FIGURES.items():
            for match in figures["pattern"](phrase).finditer(text):
                pages_of[phrase].add(name)
                spans.append(match.span(1))
                if match[1] != figure:
                    found.append(f"{name}: {match[0]!r}, and the file has {figure}")
        found += [f"{name}: {match[0]!r} is in no phrase of the file" for match in COUNTED.finditer(text)
                  if match.span(1) not in spans]
    found += [f"{phrase}: on no page" for phrase, pages in pages_of.items() if not pages]
    return found + [f"{phrase}: on {sorted(pages)}; one page has it, and others link to it"
                    for phrase, pages in pages_of.items() if len(pages) > 1 and not REPEATED.search(phrase)]


def texts() -> dict[str, str]:
    return {page.name: re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
            for page in figures["pages"]()}


def test_the_pages_have_the_figures_of_the_file() -> None:
    assert problems(texts()) == [], WRITE


@pytest.mark.parametrize(("before", "after", "problem"), [
    ("lists 126 features", "lists 125 features", "and the file has 126"),
    ("needs a GPU, in 15 minutes", "needs a GPU, in a quarter of an hour", "on no page"),
    ("# Strategies", "# Strategies\n\nThere are twelve tests.", "is in no phrase"),
    ("# Strategies", "# Strategies\n\nOf 45 minutes of tests", "one page has it")])
def test_a_number_that_contradicts_is_found(before: str, after: str, problem: str) -> None:
    changed = {name: text.replace(before, after) for name, text in texts().items()}
    assert changed != texts() and any(problem in each for each in problems(changed))
