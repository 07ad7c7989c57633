"""All tests run in three processes of pytest-xdist, the longest first, and the jobs that they start are counted."""

import ast
import gc
from pathlib import Path
from typing import Any

import pytest

from .durations import FILE, Durations
from .support import jobs

JOBS = Path(__file__).parent / "jobs"
PROCESSES = 3  # One more than cores on a small machine: jobs often wait, and two processes leave a third of them idle.
_there = pytest.StashKey[set[str]]()  # The units of all tests that were collected
_refusal = pytest.StashKey[str]()  # Why the budget refuses the run; without an entry the run may go on
_ran = pytest.StashKey[dict[str, list[float | None]]]()  # By unit: seconds of the first level, and of nightly tests


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("levels")
    group.addoption("--budget", action="store_true", help="fail before the first test if the tests that are not "
                    "nightly take more than the budget of tests/durations.txt")
    group.addoption("--share", metavar="I/N", help="run share I of N of the tests")
    group.addoption("--write-durations", action="store_true", help="write how long the tests took to "
                    "tests/durations.txt")


def pytest_configure(config: pytest.Config) -> None:
    """An unknown marker in -m would select no test, or all, without a word."""
    config.stash[_ran] = {}
    known = {line.split(":")[0].split("(")[0].strip() for line in config.getini("markers")}
    try:
        words = {node.id for node in ast.walk(ast.parse(config.option.markexpr or "True", mode="eval"))
                 if isinstance(node, ast.Name)}
    except SyntaxError:
        return  # pytest says so.
    if unknown := sorted(words - known):
        raise pytest.UsageError(f"-m: there is no marker {', '.join(unknown)}. Write -m nightly for what plain pytest "
                                "leaves out, or -m \"\" for all tests")


def unit_of(item: pytest.Item) -> str:
    """What one process runs as a whole, see tests/durations.py."""
    return item.nodeid if JOBS in item.path.parents else item.nodeid.split("::")[0]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select a share, and sort: the longest units come first, lest one of them runs alone at the end."""
    durations = Durations.read(FILE.read_text())
    units = {item: unit_of(item) for item in items}
    config.stash[_there] = set(units.values())
    if config.getoption("--budget") and (problem := durations.problem(
            unit for item, unit in units.items() if item.get_closest_marker("nightly") is None)):
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(problem)
        config.stash[_refusal], items[:] = problem, []  # pytest-xdist would hide an error of a process.
    if words := config.getoption("--share"):
        chosen = durations.share(units.values(), words)
        config.hook.pytest_deselected(items=[item for item in items if units[item] not in chosen])
        items[:] = [item for item in items if units[item] in chosen]
    for item in items:
        item.user_properties.append(("unit", units[item]))
        if JOBS not in item.path.parents:
            item.add_marker(pytest.mark.xdist_group(item.path.name))  # One worker runs the tests of a file.
    items.sort(key=lambda item: -durations.total_s(units[item]))


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


class _Clock:
    """Adds up how long each unit takes, in the process that has started the others."""

    def __init__(self, seconds: dict[str, list[float | None]]):
        self._seconds = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        level = int("nightly" in report.keywords)
        of_unit = self._seconds.setdefault(dict(report.user_properties)["unit"], [None, None])
        of_unit[level] = (of_unit[level] or 0.0) + report.duration


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--write-durations") and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(_Clock(session.config.stash[_ran]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist gives its parent the jobs that it has started, and the units that it has collected."""
    there = session.config.stash.get(_there, set())
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(jobs=jobs.started, there=sorted(there),
                                           refusal=session.config.stash.get(_refusal, ""))
    elif session.config.getoption("--write-durations"):
        before = Durations.read(FILE.read_text())
        # A run of some files has collected their units alone, and leaves the others as they are.
        if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
            there = {*before.units, *there}
        FILE.write_text(before.updated(session.config.stash[_ran], there).written())


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    """A process of pytest-xdist has ended. One that has crashed has no output."""
    output = getattr(node, "workeroutput", {})
    jobs.started.extend(output.get("jobs", ()))
    node.config.stash.setdefault(_there, set()).update(output.get("there", ()))
    node.config.stash[_refusal] = output.get("refusal", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if refusal := terminalreporter.config.stash.get(_refusal, ""):
        terminalreporter.write_line(refusal, red=True)
    terminalreporter.write_line(f"{len(jobs.started)} jobs were started, by mpirun and otherwise.")
