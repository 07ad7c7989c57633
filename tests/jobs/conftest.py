"""The jobs that several tests look at."""

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ..support.jobs import Finished, run_job, run_limited
from ..support.scripts import Line, Ran, endings, lines_of

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and any(lines_of(item)):
            item.add_marker(pytest.mark.xdist_group("scripts"))  # The fixture `ran` starts their jobs once.


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A shell makes commands in the background ignore Ctrl-C, and what they start inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Line], Ran]:
    """How a script has ended. The first call for a number of ranks runs the scripts that all selected tests need."""
    jobs: dict[int, Finished] = {}

    def of(line: Line) -> Ran:
        if line.ranks not in jobs:
            needed = dict.fromkeys(other.words for item in request.session.items for other in lines_of(item)
                                   if other.ranks == line.ranks)
            command = ["tests/scripts/one_after_other.py", str(tmp_path_factory.mktemp("scripts")), *needed]
            limit_s = 60 + 40 * len(needed)
            jobs[line.ranks] = run_limited([sys.executable, *command], limit_s=limit_s) if line.ranks == 1 else \
                run_job(line.ranks, ["python", *command], limit_s=limit_s)
        return dict(endings(jobs[line.ranks], line.ranks))[line.words]

    return of
