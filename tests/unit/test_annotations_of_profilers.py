"""Reductions are marked for profilers while they run."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

from mpistrat.core import annotations
from mpistrat.core.handle import Entry, Handle
from mpistrat.core.interfaces import DeviceExecutor, Observer
from mpistrat.core.request import ScaledOp, Sum, allgather_request, allreduce_request, specs_of
from mpistrat.core.topology import Topology
from mpistrat.engine.executor import Executor
from tests.support.thread_group import ThreadGroup

# The callback is the one of a job of one rank, in a process of its own: a profile is one of the whole process.
PROFILE = """
import sys, types, contextlib
seen = []
def annotate(name):
    seen.append(name)
    return contextlib.nullcontext()
sys.modules["nvtx"] = types.ModuleType("nvtx")
sys.modules["nvtx"].annotate = annotate
sys.modules["nvtx"].__spec__ = types.SimpleNamespace()
import numpy, tensorflow as tf, mpistrat, mpistrat.tensorflow as hvd
hvd.init()
mpistrat.allreduce(numpy.ones(4), name="before")
tf.profiler.experimental.start(sys.argv[1])
mpistrat.allreduce(numpy.ones(4), name="in_profile")
tf.profiler.experimental.stop()
print(seen)
"""


@pytest.fixture
def executor() -> Executor:
    return Executor(ThreadGroup(1).data(0), Topology(0, ("",)), 1000, DeviceExecutor(), Observer())


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What two profilers see: the names of what begins and ends."""
    seen: list[str] = []

    def maker(profiler: str) -> "object":
        @contextmanager
        def make(name: str) -> Iterator[None]:
            seen.append(f"{profiler} begins {name}")
            yield
            seen.append(f"{profiler} ends {name}")
        return make

    monkeypatch.setattr(annotations, "makers", [])
    monkeypatch.setattr(annotations, "is_on", bool)
    for profiler in ("one", "two"):
        annotations.add(maker(profiler), bool)
    return seen


def entry(name: str, is_gathered: bool = False) -> Entry:
    arrays = [np.ones(3)]
    request = allgather_request(name, specs_of(arrays)) if is_gathered else allreduce_request(
        name, specs_of(arrays), ScaledOp(Sum))
    return Entry(request, arrays, Handle(name))


@pytest.mark.parametrize(("is_gathered", "is_prepared"), [(False, False), (False, True), (True, False)])
def test_what_is_executed_is_marked_for_all_profilers(executor: Executor, marks: list[str], is_gathered: bool,
                                                      is_prepared: bool) -> None:
    made = entry("x", is_gathered)
    if is_prepared:
        executor.prepare(made)
    executor.execute([made])
    name = f"{'ALLGATHER' if is_gathered else 'ALLREDUCE'} x"
    assert marks == [f"one begins {name}", f"two begins {name}", f"two ends {name}", f"one ends {name}"]


def test_what_shares_a_reduction_is_marked_once(executor: Executor, marks: list[str]) -> None:
    executor.execute([entry("a"), entry("b")])
    assert marks[0] == "one begins ALLREDUCE a" and len(marks) == 4


def test_without_a_profiler_nothing_is_made(executor: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotations, "makers", [])
    monkeypatch.setattr(annotations, "is_on", bool)
    for _ in range(2):
        context = annotations.marked(entry("x").request)
        assert isinstance(context, AbstractContextManager) and context is annotations.marked(entry("y").request)
        annotations.add(lambda name: 1 // 0, lambda: False)  # a profiler that does not run


@pytest.mark.nightly
def test_a_profile_of_tensorflow_has_them_and_nvtx_too(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROFILE, str(tmp_path)], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['ALLREDUCE before', 'ALLREDUCE in_profile']"
    profile = b"".join(path.read_bytes() for path in tmp_path.rglob("*.xplane.pb"))
    assert b"ALLREDUCE in_profile" in profile and b"ALLREDUCE before" not in profile
