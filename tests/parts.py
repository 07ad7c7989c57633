"""The long tests in three parts of about the same length: `.ci/run` runs one of them, `.ci/run --all` all.

A unit is a file of tests, a session of test_parallel.py, or "scripts": all tests that share the jobs of the
fixture `ran`. Beside its part, a run has the long tests whose own file, or whose script, has changed lately.
"""

import functools
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from .support.jobs import ROOT
from .support.scripts import lines_of

# "Lately": in the commits of so many hours before the newest one.
HOURS = 4
PARTS: tuple[frozenset[str], ...] = (
    frozenset({"rest on 3", "graphs on 2", "graphs on 3", "slow networks on 2", "coordinator_at_scale", "gpu_command",
               "two_hosts", "failures", "launcher", "supervisor", "jobs", "strangers", "graphs_are_freed", "elastic",
               "elastic_hosts", "rest on 2, long", "two_shot", "old_keras"}),
    frozenset({"strategy on 3", "slow networks on 3", "same bits on 2", "same bits on 3", "cluster_resolver", "memory",
               "chunks", "fork", "join", "process_sets", "quantised", "gpu_figures", "gpu_two_ranks", "examples",
               "strategy on 2, long", "as_horovod", "garbage"}),
    frozenset({"scripts", "checks on 2", "checks on 3", "features on 2", "order", "transcript", "random_programs",
               "real_scripts", "sessions", "programs", "data_service", "run_function", "deadlocks", "foreign_examples",
               "keras2 on 2", "keras2 on 3", "cli_run", "cli_bench", "strategy", "slurm", "ranks_lost", "efficiency",
               "timeline", "completion", "gpu_assignment", "annotations_of_profilers", "async_op",
               "elastic_decisions"}),
)
# What a worker of pytest-xdist runs as a whole, the longest first.
FIRST = ("rest on 3", "scripts", "rest on 2", "strategy on 2", "strategy on 3", "slow networks on 3",
         "strategy on 2, long", "rest on 2, long", "slow networks on 2", "graphs on 2", "features on 2",
         "same bits on 2", "same bits on 3", "checks on 2")


def place(item: pytest.Item) -> int:
    """Where a test comes in the order of all tests: the longest first, lest one of them runs alone at the end."""
    return FIRST.index(unit) if (unit := unit_of(item)) in FIRST else len(FIRST)


def unit_of(item: pytest.Item) -> str:
    """The unit of a test."""
    if any(lines_of(item)):
        return "scripts"
    if item.path.name == "test_parallel.py":
        part, ranks, tests = (item.callspec.params[name] for name in ("part", "ranks", "tests"))
        return f"{part} on {ranks}" + (", long" if tests == "long" else "")
    return item.path.stem.removeprefix("test_")


def part_of(unit: str) -> int:
    """The number of the part that has a unit."""
    parts = [number for number, units in enumerate(PARTS) if unit in units]
    if len(parts) != 1:
        raise pytest.UsageError(f"tests/parts.py has the long tests {unit!r} in {len(parts)} parts")
    return parts[0]


@functools.cache
def changed_lately() -> Sequence[str]:
    """The paths, from the root of the checkout, of what has changed lately; () without git."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    try:
        newest = int(git("log", "-1", "--format=%ct"))
        return sorted(set(git("log", f"--since={newest - HOURS * 3600}", "-m", "--format=", "--name-only").split()))
    except (OSError, subprocess.CalledProcessError):
        return ()


def has_changed(item: pytest.Item) -> bool:
    """Whether the file of a test of tests/jobs, or a script that it names, has changed lately."""
    if item.path.name == "test_parallel.py":  # which runs no other file of the session
        if item.callspec.params["ranks"] != 2:  # Two ranks run the file, and a third when its part comes.
            return False
        session = (item.callspec.params[name] for name in ("part", "ranks", "tests"))
        return any(file in changed_lately() for file in item.module.files_of(*session))
    scripts = [Path(path).stem for path in changed_lately()
               if path.startswith(("examples/", "tests/scripts/", "tests/tutorials/", "tests/real_scripts/"))]
    lines = list(lines_of(item))
    text = " ".join(line.words for line in lines) if lines else item.path.read_text()
    return str(item.path.relative_to(ROOT)) in changed_lately() or any(
        re.search(rf"\b{re.escape(script)}\b", text) for script in scripts)
