"""How long each unit of tests takes, as the last whole run has measured it: tests/durations.txt.

A unit is what one process of pytest-xdist runs as a whole: a file, or a test of tests/jobs. The longest units begin
first, lest one of them runs alone at the end. `--budget` compares the first level's sum with the number at the top of
the file, `--share I/N` divides all units into N shares of about the same length, and `--write-durations` writes the
units that have run into the file.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

FILE = Path(__file__).with_suffix(".txt")
_HEAD = """# Seconds of each unit of tests on two quiet cores: first level, nightly, name. Written by --write-durations.
# The first level may take so many seconds in all. A commit that raises the number says why.
budget {budget}
"""
_WRITE = ".venv/bin/python -m pytest --write-durations"


@dataclass(frozen=True)
class Durations:
    budget_s: float
    units: Mapping[str, tuple[float, float]]  # By unit: seconds of the first level, and of its nightly tests.

    @classmethod
    def read(cls, text: str) -> "Durations":
        """Raises pytest.UsageError for a line that cannot be read."""
        budget, units = None, {}
        for line in text.splitlines():
            if not line or line.startswith("#"):
                continue
            if found := re.fullmatch(r"budget (\d+)", line):
                budget = float(found[1])
            elif found := re.fullmatch(r" *([\d.]+) +([\d.]+) (tests/.+)", line):
                units[found[3]] = float(found[1]), float(found[2])
            else:
                raise pytest.UsageError(f"tests/durations.txt: {line!r} is not \"budget SECONDS\" and not \"SECONDS "
                                        f"SECONDS UNIT\". Write it anew: {_WRITE}")
        if budget is None:
            raise pytest.UsageError("tests/durations.txt has no line \"budget SECONDS\"")
        return cls(budget, units)

    def written(self) -> str:
        lines = (f"{first:7.1f} {nightly:7.1f} {unit}\n" for unit, (first, nightly) in sorted(self.units.items()))
        return _HEAD.format(budget=f"{self.budget_s:g}") + "".join(lines)

    def total_s(self, unit: str) -> float:
        """Seconds of both levels. A unit without a duration is taken for a long one."""
        return sum(self.units.get(unit, (60.0, 0.0)))

    def problem(self, units: Iterable[str]) -> str | None:
        """Why a run of the first level is refused, of which these are the units; None if it may run."""
        selected = sorted(set(units))
        if unknown := [unit for unit in selected if unit not in self.units]:
            return "\n".join([f"{len(unknown)} units have no duration in tests/durations.txt:", *unknown,
                              f"Measure them on a quiet machine: {_WRITE} {' '.join(unknown[:3])}"])
        total = sum(self.units[unit][0] for unit in selected)
        if total <= self.budget_s:
            return None
        slowest = sorted(selected, key=lambda unit: -self.units[unit][0])[:20]
        return "\n".join([
            f"The first level takes {total:.0f} s of tests, and may take {self.budget_s:.0f} s (tests/durations.txt). "
            "The slowest are:", *(f"{self.units[unit][0]:7.1f} {unit}" for unit in slowest),
            "Make them faster, mark what repeats another test as nightly, or raise the number in a commit that says "
            "why."])

    def share(self, units: Iterable[str], words: str) -> set[str]:
        """The units of share I of N, for words `I/N`: the longest unit first, each to the share that has least."""
        found = re.fullmatch(r"(\d+)/(\d+)", words)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise pytest.UsageError(f"--share {words}: there is no such share; write 1/3, 2/3 or 3/3 for three shares")
        shares: list[set[str]] = [set() for _ in range(int(found[2]))]
        sums = [0.0] * len(shares)
        for unit in sorted(set(units), key=lambda unit: (-self.total_s(unit), unit)):
            least = sums.index(min(sums))
            shares[least].add(unit)
            sums[least] += self.total_s(unit)
        return shares[int(found[1]) - 1]

    def updated(self, ran: Mapping[str, tuple[float | None, float | None]], there: Iterable[str]) -> "Durations":
        """With what has run in place of what was known, and without the units that are not there any more.

        `ran`: By unit, seconds of each level; None for a level of which nothing has run.
        """
        known = set(there)
        units = {unit: seconds for unit, seconds in self.units.items() if unit in known}
        for unit, measured in ran.items():
            first, nightly = (old if new is None else round(new, 1)
                              for new, old in zip(measured, units.get(unit, (0.0, 0.0))))
            units[unit] = first, nightly
        return Durations(self.budget_s, units)
