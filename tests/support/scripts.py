"""Scripts that tests look at after they have run: one job for each number of ranks runs all of them.

A test names the scripts that it needs by parameters which are `Line`s, and gets what they left from the fixture `ran`.
The job runs the lines of all selected tests, in the order of the tests.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .jobs import Finished


@dataclass(frozen=True)
class Line:
    ranks: int  # How many ranks run it; 1 is a process without mpirun.
    words: str  # Variables of the environment, the path of the script from the root of the checkout, its arguments.
    # Variables of the environment with which its job starts. Only lines that have the same share a job.
    start: str = field(default="", kw_only=True)
    after: "Line | None" = field(default=None, kw_only=True)  # A line that runs before it, with whose files it goes on.

    def __str__(self) -> str:
        return f"{self.words} on {self.ranks}"


@dataclass(frozen=True)
class Ran:
    error: tuple[str, ...]  # Of each rank: the text or code that it has given to sys.exit; "" if it has ended well.
    output: tuple[str, ...]  # Of each rank: what it has printed to stdout.
    # Of each rank: which global names of the script hold variables, and whether all ranks have the same bits.
    equal: tuple[str, ...]
    directory: Path  # Where it ran, on all ranks.

    @property
    def well(self) -> str:
        """What the chief has printed. All ranks must have ended well."""
        assert not any(self.error), self
        return self.output[0]


def lines_of(item: pytest.Item) -> Iterator[Line]:
    if not hasattr(item, "callspec"):
        return
    for value in item.callspec.params.values():
        for line in value if isinstance(value, tuple) else (value,):
            if isinstance(line, Line):
                yield from (line,) if line.after is None else (line.after, line)


def endings(job: Finished, ranks: int) -> list[tuple[str, Ran]]:
    """The words of each script of a job of tests/programs/run.py, and how it has ended."""
    assert job.code == 0, job.output
    assert job.left == (), job.output
    by_rank = [[json.loads(line) for line in job.of_rank(rank) if line.startswith("{")] for rank in range(ranks)]
    return [(of_ranks[0]["line"], Ran(*(tuple(of_rank[field] for of_rank in of_ranks)
                                        for field in ("error", "output", "equal")), Path(of_ranks[0]["directory"])))
            for of_ranks in zip(*by_rank, strict=True)]
