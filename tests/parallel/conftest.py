"""The same pytest session on every rank: `mpirun -np 2 python -m pytest tests/parallel`.

Ranks run the same tests in the same order. A test may skip by size, never by rank. When a test fails on one rank, its
report is printed and the job ends, since the other ranks would wait for it. Only rank 0 reports progress.
"""

import dataclasses
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from mpistrat.process.launch_env import launched_size

if TYPE_CHECKING:  # Ranks import it when they have begun.
    from mpistrat.core.handle import Entry
    from mpistrat.tensorflow import MPIStrategy

collect_ignore_glob = [] if launched_size(os.environ)[0] > 1 else ["*.py"]


@pytest.hookimpl(trylast=True)  # after the reporter has been made
def pytest_configure(config: pytest.Config) -> None:
    if launched_size(os.environ)[0] <= 1:
        return
    import mpistrat
    mpistrat.init()
    if mpistrat.rank() != 0:
        config.option.verbose = -2
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and launched_size(os.environ)[0] > 1:
        from mpi4py import MPI  # which is there also where a test has shut down mpistrat
        world = MPI.COMM_WORLD
        print(f"\n=== {report.nodeid} ({report.when}) failed on rank {world.Get_rank()} of {world.Get_size()}\n"
              f"{report.longreprtext}\n{report.capstdout}{report.capstderr}", file=sys.__stderr__, flush=True)
        world.Abort(1)


@pytest.fixture(scope="session", autouse=True)
def _same_tests(request: pytest.FixtureRequest) -> None:
    import mpistrat
    names = mpistrat.allgather_object([item.nodeid for item in request.session.items])
    assert all(other == names[0] for other in names), "the ranks have collected different tests"


@pytest.fixture
def rank() -> int:
    import mpistrat
    return mpistrat.rank()


@pytest.fixture
def size() -> int:
    import mpistrat
    return mpistrat.size()


@pytest.fixture
def shared_dir() -> Iterator[str]:
    """A directory that all ranks see, gone afterwards."""
    import mpistrat
    own = tempfile.TemporaryDirectory() if mpistrat.rank() == 0 else None
    yield mpistrat.broadcast_object(own.name if own else None, 0)
    mpistrat.barrier()
    if own:
        own.cleanup()


@pytest.fixture(scope="module")
def strategy() -> "MPIStrategy":
    """One with the default arguments."""
    from mpistrat.tensorflow import MPIStrategy
    return MPIStrategy()


@pytest.fixture
def initialised_afterwards() -> Iterator[None]:
    yield
    import mpistrat
    mpistrat.init()


@pytest.fixture
def without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with MPISTRAT_CHECK_ACTION=off."""
    from mpistrat.api import runtime
    settings = dataclasses.replace(runtime.current().settings, check_action="off")
    monkeypatch.setattr(runtime.current(), "settings", settings)


@pytest.fixture
def no_warning_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing had been trained in this process, and no warning given."""
    from mpistrat.tensorflow import consistency
    monkeypatch.setattr(consistency, "_has_warned", False)
    monkeypatch.setattr(consistency, "_all", weakref.WeakSet())


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list["Entry"]:
    """What this rank hands to the engine in the test."""
    from mpistrat.engine.queue import TensorQueue
    put = TensorQueue.put
    seen: list[Entry] = []

    def spy(self: TensorQueue, entry: "Entry", is_driver: bool = False) -> bool:
        seen.append(entry)
        return put(self, entry, is_driver)

    monkeypatch.setattr(TensorQueue, "put", spy)
    return seen


@pytest.fixture
def restart() -> Callable[[], None]:
    """Makes a new engine in place of one that an error in a graph has ended."""
    def shut_down_and_init() -> None:
        import mpistrat
        mpistrat.shutdown()
        mpistrat.init()
    return shut_down_and_init
