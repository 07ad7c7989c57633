"""How a program of the table is run: with all others of its file that have as many ranks, in one job."""

import importlib.util
import re
import sys
from collections.abc import Callable

import pytest

from ..support.jobs import Finished, run_job, run_limited
from ..support.scripts import Line, Ran, endings, lines_of
from .table import Program


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Line], Ran]:
    """How a program has ended. The first call for a kind of job runs all its programs that the file needs, once."""
    jobs: dict[tuple[int, str], Finished | BaseException] = {}

    def of(line: Line) -> Ran:
        kind = line.ranks, line.start
        if kind not in jobs:
            needed = dict.fromkeys(other.words for item in request.session.items if item.path == request.path
                                   for other in lines_of(item) if (other.ranks, other.start) == kind)
            command = ["tests/programs/run.py", str(tmp_path_factory.mktemp("programs")), "tests/programs/files.py",
                       *needed]
            env, limit_s = dict(word.split("=") for word in line.start.split()), 600 + 60 * len(needed)
            try:
                jobs[kind] = run_limited([sys.executable, *command], env=env, limit_s=limit_s) if line.ranks == 1 \
                    else run_job(line.ranks, ["python", *command], env=env, limit_s=limit_s)
            except pytest.fail.Exception as not_done:  # Its other programs would wait as long for the same.
                jobs[kind] = not_done
        job = jobs[kind]
        if not isinstance(job, Finished):
            raise job
        return dict(endings(job, line.ranks))[line.words]

    return of


def check(program: Program, ran: Callable[[Line], Ran]) -> list[float]:
    """Assert that a program has done what its row says; the numbers that it has printed."""
    if program.needs and importlib.util.find_spec(program.needs) is None:
        pytest.skip(f"{program.needs} is not installed")
    if isinstance(program.after, Program):
        check(program.after, ran)
    found = ran(program)
    if found.error[0].startswith("skipped: "):
        pytest.skip(found.error[0])
    for error in found.error:
        assert re.match(program.error, error) if program.error else not error, found
    chief, *others = found.output
    assert program.all_say or not any(others), found
    numbers: list[float] = []
    for output in found.output if program.all_say else (chief,) if program.says else ():
        matches = list(re.finditer(program.says, output, re.MULTILINE))
        assert len(matches) == 1, found
        numbers += map(float, matches[0].groups())
    assert all(number >= program.least for number in numbers), found
    for equal in found.equal if program.equal is not None else ():
        assert equal.endswith(": equal") and program.equal in equal, found
    return numbers
