"""All tests run in two processes of pytest-xdist, and the jobs that these start are counted together."""

from typing import Any

import pytest

from .support import jobs


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` without a path, and without -n, runs its tests in two processes.

    With a path, as in `pytest tests/unit`, all tests run in this process, which -s, --pdb and mpirun need.
    """
    if (config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.pluginmanager.hasplugin("xdist")
            and config.option.numprocesses is None and not config.option.usepdb
            and not hasattr(config, "workerinput")):
        config.option.numprocesses, config.option.dist = 2, "worksteal"


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
