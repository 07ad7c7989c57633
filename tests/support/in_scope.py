"""A pytest plugin: the body of each test runs in the scope of an MPIStrategy, on all ranks.

    mpirun -np 2 python -m pytest -p tests.support.in_scope --ends FILE PATH ...

What a test prepares in setUp comes before the scope: Keras' tests clear the session there, and the scope with it. The
ranks agree after each test on how it has ended, and rank 0 adds a line to FILE; `ends_of` reads it. If a test fails on
one rank alone, that rank ends its engine, so that the others wait for nothing, and the next test gets new engines.
Tests that FILE names already are left out, so a job that a test has ended can be followed by one with the rest.
"""

import functools
import importlib.util
import json
import shutil
import sys
import tempfile
import threading
import time
import types
import unittest
from collections.abc import Generator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

_OUTCOMES = ["passed", "skipped", "failed"]


@dataclass(frozen=True)
class End:
    test: str  # Its id, from the root directory.
    outcome: str = "hangs"  # Or passed, failed, skipped; what any rank has, the worst of all ranks'.
    seconds: float = 0.0
    texts: tuple[str, ...] = ()  # What each rank says about it.


def ends_of(file: Path) -> dict[str, End]:
    """The tests by their ids. "hangs" is one that has begun and not ended."""
    return {end.test: end for end in (End(**json.loads(line)) for line in file.read_text().splitlines())}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ends", type=Path, required=True, help="the file of how each test has ended")
    parser.addoption("--leave-out", action="append", default=[], help="the id of a test that is not run")


@pytest.hookimpl(trylast=True)  # after the reporter has been made
def pytest_configure(config: pytest.Config) -> None:
    import mpistrat
    mpistrat.init()
    config.pluginmanager.register(_InScope(config), "in the scope")
    if mpistrat.rank():
        config.pluginmanager.unregister(config.pluginmanager.get_plugin("terminalreporter"))


class _InScope:
    def __init__(self, config: pytest.Config):
        from keras.src import testing
        from mpi4py import MPI
        if importlib.util.find_spec("jax") is None:  # Keras' tests import it, and need it with its own backend only.
            sys.modules["jax"] = types.ModuleType("jax")
        self._ranks, self._file = MPI.COMM_WORLD, config.getoption("--ends")
        self._reports: list[pytest.TestReport] = []

        own_directory = testing.TestCase.get_temp_dir

        def directory(case: unittest.TestCase) -> str:
            """A directory of each rank's own, since tests remove files; but the chief alone reads and writes a backup.
            """
            if "backup_and_restore" not in type(case).__module__:
                return str(own_directory(case))
            path: str = self._ranks.bcast("" if self._ranks.rank else tempfile.mkdtemp())
            case.addCleanup(shutil.rmtree, path, ignore_errors=True)
            return path

        testing.TestCase.get_temp_dir = directory

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = {*config.getoption("--leave-out"), *(ends_of(self._file) if self._file.exists() else ())}
        self._ranks.Barrier()  # All have read it.
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function) -> Generator[None, object, object]:
        import keras

        from mpistrat.tensorflow import MPIStrategy
        body = item.obj

        @functools.wraps(body)
        def in_scope(*args: object, **kwargs: object) -> object:
            keras.utils.set_random_seed(1)  # The ranks make one array of random numbers.
            try:
                with MPIStrategy().scope():
                    return body(*args, **kwargs)
            except ModuleNotFoundError as error:
                pytest.skip(f"needs {error.name}")

        item.obj = in_scope
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        import mpistrat
        self._say(End(item.nodeid))
        self._reports, began = [], time.monotonic()
        result = yield
        worst = max(self._reports, key=lambda report: _OUTCOMES.index(report.outcome))
        shutdown = threading.Thread(target=mpistrat.shutdown)  # It returns when all ranks have called it.
        if worst.failed:
            shutdown.start()
        all_done = self._ranks.Ibarrier()
        while not all_done.Test():
            time.sleep(0.005)  # A rank that spins in a call of MPI takes a core from the others.
        outcomes, texts = zip(*self._ranks.allgather((_OUTCOMES.index(worst.outcome), worst.longreprtext)))
        outcome = _OUTCOMES[max(outcomes)]
        if outcome == "failed":
            if not worst.failed:
                shutdown.start()
            shutdown.join()
            mpistrat.init()
        self._say(End(item.nodeid, outcome, round(time.monotonic() - began, 1), texts))
        return result

    def _say(self, end: End) -> None:
        if not self._ranks.rank:
            with self._file.open("a") as file:
                file.write(json.dumps(asdict(end)) + "\n")
