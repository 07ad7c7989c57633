"""Run all programs of the differential harness, and random models, under mpirun; nothing else must be running.

    python -m tests.differential --models 200 --ranks 2 3
    python -m tests.differential --models 0 --programs "resnet50" "adam" --ranks 4
    python -m tests.differential --models 1 --first 17 --programs none

Each job has a number of programs, and a time limit. Programs that TensorFlow does not repeat bit by bit (ResNet-50)
run a second time with one inter-op thread, with which it does, so that the legs can be compared. Each operation has
several threads in any case. A program that fails is reported with the command that runs it alone, and the exit status
is 1 in the end.

Needs mpirun, TensorFlow and Keras.
"""

import argparse
import re
import sys
import time
from collections.abc import Mapping

from tests.support.jobs import run_job

from .check import ONE_THREAD, SEED, recipe_named
from .programs import PROGRAMS

# An operation that adds in no fixed order is seen with several threads only.
_SEVERAL_THREADS = {"TF_NUM_INTRAOP_THREADS": "4", "MPISTRAT_BIND": "gpu"}
_LINE = re.compile(r"'(.+)' (is the same|FAILED: .*) \(([0-9.]+) s\)")


def main() -> int:
    """Run what the command line asks for; 1 if anything has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=200, help="how many random models")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--programs", nargs="*", default=["all"], metavar="NAME",
                        help=f"all, none, or some of: {', '.join(map(repr, PROGRAMS))}")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3], help="how many there are, in one job each")
    parser.add_argument("--job-size", type=int, default=20, help="how many programs share their processes")
    parser.add_argument("--limit", type=float, default=1800, help="how many seconds a job may take")
    options = parser.parse_args()
    chosen = {"all": list(PROGRAMS), "none": []}.get(options.programs[0] if options.programs else "none",
                                                     options.programs)
    unknown = [name for name in chosen if name not in PROGRAMS]
    if unknown:
        parser.error(f"there are no programs named {', '.join(map(repr, unknown))}")
    names = chosen + [f"{SEED}{options.first + i}" for i in range(options.models)]
    began, failed = time.monotonic(), []
    for ranks in options.ranks:
        for start in range(0, len(names), options.job_size):
            failed += _failed(ranks, names[start:start + options.job_size], options.limit)
        again = [name for name in names if not recipe_named(name).is_repeatable]
        if again:
            print("with one inter-op thread:", flush=True)
            failed += _failed(ranks, again, options.limit, ONE_THREAD)
    print(f"{len(names)} programs on each of {options.ranks} ranks in {time.monotonic() - began:.0f} s, "
          f"{len(failed)} failed.")
    for ranks, name in failed:
        which = f"--models 1 --first {name.removeprefix(SEED)} --programs none" if name.startswith(SEED) else \
            f"--models 0 --programs {name!r}"
        print(f"again: python -m tests.differential --ranks {ranks} {which}")
    return int(bool(failed))


def _failed(ranks: int, names: list[str], limit_s: float,
            env: Mapping[str, str] | None = None) -> list[tuple[int, str]]:
    """Run one job, print what became of each program, and return those that have not come to the same."""
    job = run_job(ranks, ["python", "tests/scripts/differential.py", *names], limit_s=limit_s,
                  env={**_SEVERAL_THREADS, **(env or {})})
    outcomes = {match[1]: (match[2], match[3]) for line in job.output.splitlines() if (match := _LINE.search(line))}
    failed = []
    for name in names:
        outcome, seconds = outcomes.get(name, ("did not end", "-"))
        print(f"{ranks} ranks, {name}: {outcome} ({seconds} s)", flush=True)
        if outcome != "is the same":
            failed.append((ranks, name))
    if len(outcomes) < len(names):
        print(job.output, flush=True)
    return failed


sys.exit(main())
