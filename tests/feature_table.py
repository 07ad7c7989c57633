"""Run every feature of tests/features with MPIStrategy and with TensorFlow's own strategies, and print a table.

    python -m tests.feature_table > docs/features.md

Every column is measured; a cell says what a user sees: that it works, how the error begins, that the result is not the
right one, or that the program hangs. It takes about 20 minutes on 2 cores.
"""

import argparse
import faulthandler
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass

from .jobs import Finished, run_job, run_limited

HANG_S = 60
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
    """In a process of the job: run features until one fails, and print what becomes of each. It does not return."""
    import tensorflow as tf

    import mpistrat.tensorflow as hvd

    from .features import FEATURES, World
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
    made = make()
    for name in names:
        directory = hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)
        print(f"\nbegins {name}", flush=True)
        faulthandler.dump_traceback_later(HANG_S, exit=True)  # The other processes of the job end with this one.
        try:
            FEATURES[name].program(World(made, hvd.rank(), directory))
        except BaseException as error:
            print(f"\nfails {name} {describe(error)}", flush=True)
            time.sleep(2)  # The other processes may have another error, and more to say.
            os._exit(1)
        faulthandler.cancel_dump_traceback_later()
        print(f"\nworks {name}", flush=True)
        hvd.barrier()
        made = make() if strategy == "mpi" else made
    sys.stdout.flush()
    os._exit(0)  # Not every strategy can be ended in another way.


def describe(error: BaseException) -> str:
    """How an error begins, as one line that fits into a cell."""
    if isinstance(error, AssertionError):
        return "another result"
    text = " ".join(str(error).split())
    text = re.sub(r".*?(?:Error|Exception) \[?Op:\w+\]?", "", text) or text
    shown = text if len(text) <= 70 else text[:70].rsplit(" ", 1)[0] + " …"
    return f"{type(error).__name__}: {shown}"


def cells_of(column: Column, names: list[str]) -> dict[str, str]:
    """What becomes of each feature in a column."""
    cells: dict[str, str] = {}
    tried_again = set()
    while left := [name for name in names if name not in cells]:
        output = run(column, left).output
        cells.update(dict.fromkeys(re.findall(r"^works (\w+)$", output, re.MULTILINE), WORKS))
        failed = re.findall(r"^fails (\w+) (.*)$", output, re.MULTILINE)
        begun = re.findall(r"^begins (\w+)$", output, re.MULTILINE)
        if failed:
            cells[failed[0][0]] = failed[0][1]
        elif "Timeout (" in output:
            # A machine that was busy with something else is no hang.
            if begun[-1] in tried_again:
                cells[begun[-1]] = f"hangs ({HANG_S} s)"
            tried_again.add(begun[-1])
        elif begun and begun[-1] not in cells:
            cells[begun[-1]] = "the process dies"
        elif not begun:
            sys.exit(f"{column.title}: nothing was tried:\n{output}")
        print(f"{column.title}: {len(cells)} of {len(names)}", file=sys.stderr, flush=True)
    return cells


def run(column: Column, names: list[str]) -> Finished:
    command = [sys.executable, "-m", "tests.feature_table", "--try", column.strategy, *names]
    limit_s = 60.0 + HANG_S * len(names)
    if column.processes == 1:
        return run_limited(command, limit_s=limit_s)
    return run_job(column.processes, command, limit_s=limit_s)


def table(cells: dict[str, dict[str, str]], names: list[str]) -> str:
    """The Markdown of all groups."""
    from .features import FEATURES
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
    parser.add_argument("features", nargs="*", help="their names (default: all)")
    args = parser.parse_args()
    if args.strategy:
        try_features(args.strategy, args.features)
    from .features import FEATURES
    names = args.features or list(FEATURES)
    chosen = COLUMNS if args.columns is None else [COLUMNS[int(i)] for i in args.columns.split(",")]
    print(table({column.title: cells_of(column, names) for column in chosen}, names))


if __name__ == "__main__":
    main()
