"""Runs elastic jobs and ends ranks, hosts or the link at random moments; prints the table of docs/elastic.md.

usage: python -m tests.scripts.elastic_faults FAULT TRIES [SEED]     FAULT: one of those below, or "all"
       python -m tests.scripts.elastic_faults often MINUTES [SEED]   a job of 3 ranks, of which one is killed every 30 s

A try has survived if the job ends with code 0, all ranks that are left agree, each row of the dataset was trained in
each epoch, and nothing is left of it.
"""

import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from ..support.hosts_in_namespaces import Hosts, two_hosts
from ..support.jobs import Finished, run_limited

SCRIPT = "tests/scripts/elastic_steps.py"
EPOCHS = 12
# By name: ranks, options of mpistrat run, and which of the ranks are killed.
ON_ONE_HOST: dict[str, tuple[int, tuple[str, ...], Callable[[list[int]], list[int]]]] = {
    "a rank": (3, ("--elastic",), lambda ranks: [random.choice(ranks)]),
    "the chief": (3, ("--elastic",), lambda ranks: [0]),
    "two ranks at once": (4, ("--elastic",), lambda ranks: random.sample(ranks, 2)),
    "a second rank while the others recover": (4, ("--elastic",), lambda ranks: random.sample(ranks, 2)),
    "a rank, new processes": (2, ("--elastic=restart",), lambda ranks: [random.choice(ranks)]),
}
ON_TWO_HOSTS = {"a host": "host", "the link between two hosts": "cut"}


def run_on_one_host(ranks: int, options: tuple[str, ...], choose: Callable[[list[int]], list[int]],
                    is_later: bool, log: Path) -> tuple[Finished, float]:
    """Run a job, and kill ranks at a random moment, or one after the other. Returns it, and when that was."""
    killed_at: list[float] = []
    at, later_s = random.uniform(0.05, 1.0), random.uniform(0.0, 0.1) if is_later else 0.0

    def kill(printed: str) -> None:
        # A second is long: the moment is chosen within it.
        if killed_at or not log.exists():
            return
        time.sleep(at)
        pids = dict(re.findall(r"pid (\d+) of rank (\d+)", log.read_text()))
        by_rank = {int(rank): int(pid) for pid, rank in pids.items()}
        if len(by_rank) == ranks:
            killed_at.append(time.time())
            for number, rank in enumerate(choose(sorted(by_rank))):
                time.sleep(later_s * number)
                psutil.Process(by_rank[rank]).kill()

    job = run_limited([sys.executable, "-m", "mpistrat", "run", *options, "-np", str(ranks), sys.executable, SCRIPT,
                       "--epochs", str(EPOCHS), "--pause", "0.04", "--log", str(log)], limit_s=90, watch=kill)
    return job, killed_at[0] if killed_at else 0.0


def run_with_many_losses(minutes: float, log: Path) -> tuple[Finished, list[float]]:
    """Run a job in which a random rank is killed every 30 s, and its place filled again. Returns it, and when."""
    killed_at: list[float] = []
    began = time.time()

    def kill(printed: str) -> None:
        since = time.time() - began
        if since > minutes * 60 or since < 30 * (len(killed_at) + 1) + random.uniform(0, 1):
            return
        lines = re.findall(r"^\S+ \d+ (\d+) (\d+) pid (\d+) of", log.read_text(), re.MULTILINE)
        newest = [int(pid) for _, generation, pid in lines if generation == lines[-1][1]]
        living = [pid for pid in newest if psutil.pid_exists(pid)]
        killed_at.append(time.time())
        psutil.Process(random.choice(living)).kill()

    # A rank trains 20 of the 60 rows of an epoch in 10 steps.
    epochs = round(minutes * 60 / (10 * 0.2))
    job = run_limited([sys.executable, "-m", "mpistrat", "run", "--elastic", "--restart-failed", "-np", "3",
                       sys.executable, SCRIPT, "--epochs", str(epochs), "--pause", "0.2", "--log", str(log)],
                      limit_s=minutes * 120 + 60, watch=kill)
    return job, killed_at


def run_on_two_hosts(hosts: Hosts, what: str, log: Path) -> tuple[Finished, float]:
    """Run a job with two ranks on each host, one of which ends the other host or the link."""
    first, second = hosts.names
    rank = random.choice((2, 3)) if what == "host" else random.choice((0, 1))
    with hosts.mended_after():
        job = hosts.run_line([sys.executable, "-m", "mpistrat", "run", "--elastic", "-np", "4", "-H",
                              f"{first}:2,{second}:2", "--", sys.executable, SCRIPT, "--epochs", str(EPOCHS), "--pause",
                              "0.04", "--log", str(log), "--kill", f"1:{rank}:{random.randint(2, 25)}:{what}"])
    lost = re.search(r"^(\S+) \d+ \d+ \d+ loses", log.read_text(), re.MULTILINE)
    return job, float(lost[1]) if lost else 0.0


def judged(job: Finished, killed_at: float, log: Path, epochs: int = EPOCHS) -> tuple[bool, float, int]:
    """Whether the job has survived, the seconds until its next step, and the rows that were trained again."""
    lines = re.findall(r"each row at least (\d+) times, (\d+) more in all", job.output)
    steps = [float(at) for at in re.findall(r"^(\S+) \d+ \d+ \d+ step \d+$", log.read_text(), re.MULTILINE)]
    later = [at for at in steps if at > killed_at]
    went_on = re.findall(r"^(\S+) \d+ \d+ \d+ begins", log.read_text(), re.MULTILINE)
    begun = [float(at) for at in went_on if float(at) > killed_at]
    is_well = (job.code == 0 and killed_at > 0 and bool(begun) and bool(lines) and len(set(lines)) == 1
               and int(lines[0][0]) >= epochs and job.left == ())
    first = min((at for at in later if begun and at >= min(begun)), default=float("nan"))
    return is_well, first - killed_at, int(lines[0][1]) if lines else -1


def main() -> None:
    wanted, tries = sys.argv[1], int(sys.argv[2])
    random.seed(int(sys.argv[3]) if len(sys.argv) > 3 else 0)
    if wanted == "often":
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory, "log")
            job, times = run_with_many_losses(tries, log)
            found = [judged(job, at, log, round(tries * 60 / 2)) for at in times]
            seconds = [each for _, each, _ in found]
            print(f"{job.output[-2000:]}\n{len(times)} losses in {tries} minutes: code {job.code}, survived "
                  f"{all(is_well for is_well, *_ in found)}, seconds to the next step: median "
                  f"{statistics.median(seconds):.2f}, longest {max(seconds):.2f}; rows trained again {found[-1][2]}")
        return
    for fault in [*ON_ONE_HOST, *ON_TWO_HOSTS]:
        if wanted not in ("all", fault):
            continue
        results: list[tuple[bool, float, int]] = []
        for number in range(tries):
            with tempfile.TemporaryDirectory() as directory:
                log = Path(directory, "log")
                if fault in ON_ONE_HOST:
                    job, killed_at = run_on_one_host(*ON_ONE_HOST[fault], "while" in fault, log)
                else:
                    with two_hosts() as hosts:
                        job, killed_at = run_on_two_hosts(hosts, ON_TWO_HOSTS[fault], log)
                results.append(judged(job, killed_at, log))
                if not results[-1][0]:
                    print(f"{fault}, try {number}: {job.code}, left {job.left}, killed at {killed_at}\n{job.output}\n"
                          f"{log.read_text()[-2000:]}", flush=True)
        well = [seconds for is_well, seconds, _ in results if is_well]
        print(f"| {fault} | {tries} | {len(well)} | {statistics.median(well):.2f}, {max(well):.2f} | 0 | "
              f"{max(again for *_, again in results)} |", flush=True)
    left = subprocess.run(["pgrep", "-fc", "mpistrat.elastic.agent"], capture_output=True, text=True, check=False)
    print(f"agents that are left: {left.stdout.strip()}; files in /dev/shm: {len(os.listdir('/dev/shm'))}")


if __name__ == "__main__":
    main()
