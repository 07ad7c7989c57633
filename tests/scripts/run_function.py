"""Calls mpistrat.run for the cases in argv, and prints what comes of each. It is no rank itself."""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import mpistrat

# The Python of the ranks: it runs a line of a shell for each, with the arguments of function_rank in $@.
RANK = "rank=${OMPI_COMM_WORLD_RANK:-$PMI_RANK}"


class Point:
    """A class that only this script has."""

    def __init__(self, x: float):
        self.x = x


def shell(directory: str, line: str) -> str:
    path = Path(directory, "python.sh")
    path.write_text(f"#!/bin/sh\n{RANK}\n{line}\n")
    path.chmod(0o755)
    return str(path)


def train(value: float, scale: float = 1.0) -> tuple[int, Point]:
    print(f"rank {mpistrat.rank()}: trains", flush=True)
    return mpistrat.rank(), Point(scale * float(mpistrat.allreduce(np.array([value]), op=mpistrat.Sum)[0]))


def fails() -> None:
    if mpistrat.rank() == 1:
        raise ZeroDivisionError("on rank 1")
    mpistrat.barrier()


def leaves() -> int:
    mpistrat.shutdown()
    return 5


def dies() -> None:
    if mpistrat.rank() == 1:
        os._exit(0)
    mpistrat.barrier()


def exits() -> None:
    if mpistrat.rank() == 1:
        sys.exit(0)
    mpistrat.barrier()


def nests() -> None:
    mpistrat.run(leaves, np=2)


def sleeps() -> None:
    print(f"rank {mpistrat.rank()}: sleeps", flush=True)
    time.sleep(600)


def show(case: str, directory: str) -> None:
    python = sys.executable
    if case == "result":
        # A rank of a job of its own may call it, from any thread.
        mpistrat.init()
        results: list = []
        thread = threading.Thread(
            target=lambda: results.extend(mpistrat.run(train, (3.0,), {"scale": 2.0}, num_proc=2)))
        thread.start()
        thread.join()
        assert [(rank, point.x, type(point) is Point) for rank, point in results] == [(0, 12, True), (1, 12, True)]
    elif case == "files":
        mpistrat.run(train, (3.0,), np=2, output_filename=directory)
        for rank in range(2):
            assert Path(directory, f"rank.{rank}", "stdout").read_text() == f"rank {rank}: trains\n"
            assert Path(directory, f"rank.{rank}", "stderr").exists()
    elif case == "leaves":
        assert mpistrat.run(leaves, np=2) == [5, 5]
    elif case == "remote":  # Rank 1 is as on another host, without the directory.
        there = f'if [ "$rank" = 1 ]; then exec {python} "$1" "$2" /nowhere; fi; exec {python} "$@"'
        assert mpistrat.run(leaves, np=2, executable=shell(directory, there)) == [5, 5]
        assert [rank for rank, _ in mpistrat.run(train, (3.0,), np=2, executable=shell(directory, there))] == [0, 1]
        mpistrat.run(fails, np=2, executable=shell(directory, there))
    elif case == "nowhere":
        mpistrat.run(leaves, np=2, executable=shell(directory, f'exec {python} "$1" "$2" /nowhere'))
    elif case == "late":
        mpistrat.run(leaves, np=2, start_timeout=1, executable=shell(directory, "exec sleep 600"))
    else:
        mpistrat.run({"fails": fails, "dies": dies, "exits": exits, "nests": nests, "sleeps": sleeps}[case], np=2)


for case in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            show(case, directory)
            print(f"{case}: done", flush=True)
        except mpistrat.MpistratError as error:
            print(f"{case}: {type(error).__name__}, cause {error.__cause__!r}: "
                  f"{' '.join(str(error).split())}", flush=True)
print("left:", [path.name for path in Path(tempfile.gettempdir()).glob("mpistrat-run-*")], flush=True)
