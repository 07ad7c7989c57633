"""All tests run in three processes of pytest-xdist, and the jobs that these start are counted together."""

import gc
from pathlib import Path
from typing import Any

import pytest

from . import parts
from .support import jobs

JOBS = Path(__file__).parent / "jobs"
PROCESSES = 3  # One more than cores on a small machine: jobs often wait, and two processes leave a third of them idle.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=int, choices=range(len(parts.PARTS)), metavar="N",
                     help="of the long tests, run this part and those that have changed lately (tests/parts.py)")


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long tests of other parts. The longest come first, lest one of them runs alone at the end."""
    has_first: set[str] = set()  # The tests of which a parameter has come.
    for item in items:
        if item.get_closest_marker("sampled"):
            test = item.nodeid.split("[")[0]
            if test in has_first:
                item.add_marker(pytest.mark.long)
            has_first.add(test)
    part = config.getoption("--part")
    chosen, left_out = [], []
    for item in items:
        is_run = part is None or item.get_closest_marker("long") is None or \
            part == parts.part_of(parts.unit_of(item)) or parts.has_changed(item)
        (chosen if is_run else left_out).append(item)
        if JOBS not in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))  # One worker runs the tests of a file.
    config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(chosen, key=parts.place)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all modules again and again, which takes a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` without a path, and without -n, runs its tests in three processes.

    With a path, as in `pytest tests/unit`, all tests run in this process, which -s, --pdb and mpirun need.
    """
    if hasattr(config, "workerinput"):
        # Groups, too. A worker reads the command line alone, where it does not find them.
        config.option.loadgroup = config.workerinput["has_groups"]
    elif (config.args_source is pytest.Config.ArgsSource.TESTPATHS and config.pluginmanager.hasplugin("xdist")
            and config.option.numprocesses is None and not config.option.usepdb):
        config.option.numprocesses, config.option.dist = PROCESSES, "loadgroup"
        config.option.loadscopereorder = False  # The order is that of pytest_collection_modifyitems.


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist whether one of them is to run all tests of a group."""
    node.workerinput["has_groups"] = node.config.option.dist == "loadgroup"


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
