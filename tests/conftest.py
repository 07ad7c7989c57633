"""How many jobs the tests have started, in all processes of pytest-xdist together."""

from typing import Any

import pytest

from .support import jobs


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist gives its parent the jobs that it has started."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["jobs"] = jobs.started


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended. One that has crashed has no output."""
    jobs.started.extend(getattr(node, "workeroutput", {}).get("jobs", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"{len(jobs.started)} jobs were started, by mpirun and otherwise.")
