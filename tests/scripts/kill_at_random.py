"""Kill ranks at random moments, many times, and print how many jobs went on and how soon: kill_at_random.py COUNT SEED.

Run by hand, without mpirun: it starts a job of ranks_lost.py for each kill. Names of faults after the seed select some.
"""

import random
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.jobs import run_job

WENT_ON = re.compile(r"went on as rank \d+ of (\d+); noticed after ([\d.]+) s, next step after ([\d.]+) s")
LIMIT_S = 90

# By the name of the fault: the number of ranks, the kind of ranks_lost.py, and what makes the victims.
FAULTS = {
    "one of 3, eager all-reduces": (3, "eager", lambda chance: [chance.randrange(3)]),
    "the chief, eager all-reduces": (3, "eager", lambda chance: [0]),
    "two of 4, eager all-reduces": (4, "eager", lambda chance: chance.sample(range(4), 2)),
    "one of 3, several in flight": (3, "negotiated", lambda chance: [chance.randrange(3)]),
    "one of 3, other collectives": (3, "gathered", lambda chance: [chance.randrange(3)]),
    "one of 4, process sets": (4, "sets", lambda chance: [chance.choice([0, 2, 3])]),
    "one of 2 that have not joined": (3, "joined", lambda chance: [chance.randrange(2)]),
    "a second one in the recovery": (4, "recovery", lambda chance: chance.sample(range(4), 2)),
    "one of 3, tf.function": (3, "function", lambda chance: [chance.randrange(3)]),
    "one of 3, fit": (3, "fit", lambda chance: [chance.randrange(3)]),
    "one of 3, fit under MPIStrategy": (3, "strategy", lambda chance: [chance.randrange(3)]),
}


def main(count: int, seed: int, names: list[str]) -> int:
    """Print a row for each fault. Returns the number of jobs that have not gone on."""
    failures = 0
    print("| fault | tries | survived | next step: median | max |\n|---|---|---|---|---|", flush=True)
    for name in names or FAULTS:
        ranks, kind, victims_of = FAULTS[name]
        chance, times = random.Random(f"{seed} {name}"), []
        for number in range(count):
            victims, delay_s = victims_of(chance), chance.uniform(0.05, 0.5)
            # Seconds from the first loss to the second, if the kind has one.
            second_s = chance.uniform(0.0, 0.06)
            job = run_job(ranks, ["python", "tests/scripts/ranks_lost.py", kind, ",".join(map(str, victims)),
                                  f"{delay_s:.4f}", f"{second_s:.4f}"], mpirun_args=["--with-ft", "ulfm"],
                          limit_s=LIMIT_S)
            found = WENT_ON.findall(job.output)
            if len(found) == ranks - len(victims) and not job.left and job.code == 0:
                times.append(max(float(next_s) for *_, next_s in found))
            else:
                print(f"{name}, number {number}: victims {victims} after {delay_s:.4f} s; code {job.code}, left "
                      f"{job.left}:\n{job.output}", file=sys.stderr, flush=True)
        failures += count - len(times)
        shown = f"{statistics.median(times):.2f} s | {max(times):.2f} s" if times else "- | -"
        print(f"| {name} | {count} | {len(times)} | {shown} |", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(bool(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])))
