"""Run every feature of this directory with MPIStrategy and with TensorFlow's own strategies, and print a table.

    python -m tests.programs.features > tests/programs/features/README.md

Every column is measured; a cell says what a user sees: that it works, how the error begins, that the result is not the
right one, or that the program hangs. It takes about 20 minutes on 2 cores. With --try it is a program of the tests.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

import mpistrat.tensorflow as hvd
from tests.programs.features import FEATURES, World
from tests.programs.features.common import Program
from tests.support.jobs import Finished, run_job, run_limited

HANG_S = 120
HEAD = """# What works, by strategy

Each row is a small program of `tests/programs/features`, which compares its results with those of one process. A cell
says what a user sees: that it works, how the error begins, that the result is another one, or that the program hangs.
TensorFlow 2.21 and Keras 3.15 on two cores. This measures all columns anew:
`python -m tests.programs.features > tests/programs/features/README.md`.
"""
WORKS = "works"


@dataclass(frozen=True)
class Column:
    """A strategy, and how many processes it is tried with."""

    title: str
    strategy: str
    processes: int


COLUMNS = (
    Column("MPIStrategy, 2 ranks", "mpi", 2),
    Column("MPIStrategy, 3 ranks", "mpi", 3),
    Column("MultiWorkerMirroredStrategy, 2 processes", "multi_worker", 2),
    Column("MirroredStrategy, 2 CPUs", "mirrored", 1),
    Column("CentralStorageStrategy, 2 CPUs", "central", 1),
)


def try_features(strategy: str, names: list[str]) -> None:
    """In a process of the job: run features while that can be done, and print what becomes of each; then exit.

    With MPIStrategy an exit says what does not work.
    """
    if strategy in ("mirrored", "central"):
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    hvd.init()
    make = {
        "mpi": hvd.MPIStrategy,
        "multi_worker": lambda: tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=hvd.MPIClusterResolver()),
        "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        "central": lambda: tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
    }[strategy]
    made, broken = make(), []
    for name in names:
        directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
        print(f"\nbegins {name}", flush=True)
        with ended_when_it_hangs():
            outcome, poisoned = outcome_of(FEATURES[name].program, World(made, hvd.rank(), directory))
            print(f"\nends {name} {outcome}", flush=True)
            broken += [f"{name}: {outcome}"] * (outcome != WORKS)
            everybody = hvd.allgather_object((outcome.partition(":")[0], poisoned))  # Values may differ in a message.
        if poisoned or any(other != everybody[0] for other in everybody):
            break
        made = make() if strategy == "mpi" else made
    if strategy == "mpi":
        sys.exit("; ".join(broken) or None)
    sys.stdout.flush()
    os._exit(0)  # Not every other strategy can be ended in another way.


def outcome_of(program: Program, world: World) -> tuple[str, bool]:
    """What becomes of a feature, and whether TensorFlow may be of no use afterwards."""
    try:
        program(world)
    except Exception as error:
        traceback.print_exc()
        return describe(error), isinstance(error, tf.errors.OpError)
    return WORKS, False


@contextlib.contextmanager
def ended_when_it_hangs() -> Iterator[None]:
    """Ends the process, and so the job, after HANG_S; not counting the time for which it is stopped by a signal."""
    done = threading.Event()

    def count() -> None:
        for _ in range(HANG_S):
            if done.wait(1.0):
                return
        print("\nhangs", flush=True)
        os._exit(1)
    threading.Thread(target=count, daemon=True).start()
    yield
    done.set()


def describe(error: BaseException) -> str:
    if isinstance(error, AssertionError):
        return "another result"
    # An error in a graph comes with the stack of where the graph was made, and Keras colours what it says.
    said = re.sub(r"\x1b\[\d+m", "", str(error)).strip()
    if said.startswith("in user code"):
        said = said.splitlines()[-1].strip()
    if root := re.search(r"\(0\) (.*)", said):
        said = root[1]
    lines = [line for line in said.splitlines()
             if line.strip() and not line.startswith((" ", "\t", "File ", "Detected at", "Graph execution", "[["))]
    text = " ".join(re.sub(r"\{\{.*?\}\}", "", " ".join(lines)).split())
    shown = text if len(text) <= 70 else text[:70].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {shown}"


def cells_of(column: Column, names: list[str]) -> dict[str, str]:
    cells: dict[str, str] = {}
    while left := [name for name in names if name not in cells]:
        output = run(column, left).output
        begun = re.findall(r"^begins (\w+)$", output, re.MULTILINE)
        if not begun:
            sys.exit(f"{column.title}: nothing was tried:\n{output}")
        for name, outcome in re.findall(r"^ends (\w+) (.*)$", output, re.MULTILINE):
            if cells.get(name, WORKS) == WORKS:  # What fails in one process does not work.
                cells[name] = outcome
        if begun[-1] not in cells or (cells[begun[-1]] == WORKS and "\nhangs\n" in output):
            cells[begun[-1]] = f"hangs ({HANG_S} s)" if "\nhangs\n" in output else "the process dies"
        print(f"{column.title}: {len(cells)} of {len(names)}, then {begun[-1]}: {cells[begun[-1]]}", file=sys.stderr,
              flush=True)
    return cells


def run(column: Column, names: list[str]) -> Finished:
    command = [sys.executable, "-m", "tests.programs.features", "--try", column.strategy, *names]
    limit_s = 60.0 + HANG_S * len(names)
    if column.processes == 1:
        return run_limited(command, limit_s=limit_s)
    return run_job(column.processes, command, limit_s=limit_s)


def table(cells: dict[str, dict[str, str]], names: list[str]) -> str:
    titles = list(cells)
    lines, group = [], ""
    for name in names:
        feature = FEATURES[name]
        if feature.group != group:
            group = feature.group
            lines += ["", f"## {group}", "", f"| Feature | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
        row = [cells[title][name].replace("|", "\\|").replace("<", "&lt;") for title in titles]
        lines.append(f"| {feature.title} | {' | '.join(row)} |")
    count = [f"{sum(cells[title][name] == WORKS for name in names)} of {len(names)}" for title in titles]
    head = ["| | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|", f"| work | {' | '.join(count)} |"]
    return "\n".join([*head, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="strategy", choices=sorted({column.strategy for column in COLUMNS}),
                        help="run the features in this process, which is one of a strategy's")
    parser.add_argument("--columns", help="numbers of columns, from 0, with commas between them (default: all)")
    parser.add_argument("features", nargs="*", help="their names, or those of their modules (default: all)")
    args = parser.parse_args()
    names = [name for name, feature in FEATURES.items() if not args.features or
             {name, feature.program.__module__.rpartition(".")[2]} & {*args.features}]
    if args.strategy:
        try_features(args.strategy, names)
    chosen = COLUMNS if args.columns is None else [COLUMNS[int(i)] for i in args.columns.split(",")]
    print(HEAD, table({column.title: cells_of(column, names) for column in chosen}, names), sep="\n")


if __name__ == "__main__":
    main()
