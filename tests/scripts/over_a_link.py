"""Repeat collectives between hosts, over a link that may be cut on the way; every rank tells how it ends.

usage: over_a_link.py KINDS BYTES never|between|within FOR_S DIRECTORY [caught]

KINDS, with commas between them, are some of allreduce, broadcast and allgather. Rank 0 cuts the link of its host for
FOR_S seconds (0: for good): before a call of its own, or within one, once some of its bytes are on the wire. What the
launcher does not hear of any more is in DIRECTORY: the time of the cut in `cut`, and the error of rank R, which ends
the script or is caught, in `R`, after the time.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from reporting import say

import mpistrat

CABLE = "cable"
WARM_UP, TIMES = 3, 5
kinds, size_text, when, for_text, directory_text, *caught = sys.argv[1:]
nbytes, for_s, directory = int(size_text), float(for_text), Path(directory_text)


def sent() -> int:
    """How many bytes have left this host."""
    line, = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.split()[0] == f"{CABLE}:")
    return int(line.split()[9])


def cut() -> None:
    """Cut the link, for as long as it is to be."""
    subprocess.run(["ip", "link", "set", CABLE, "down"], check=True)
    (directory / "cut").write_text(str(time.time()))
    if for_s:
        time.sleep(for_s)
        subprocess.run(["ip", "link", "set", CABLE, "up"], check=True)


def cut_once(are_sent: int) -> None:
    """Cut the link once so many bytes are on it."""
    while sent() < are_sent:
        time.sleep(0.001)
    cut()


def once(step: int) -> None:
    own = np.full(nbytes // 4, step + rank, np.float32)
    for kind in kinds.split(","):
        if kind == "allreduce":
            total = mpistrat.allreduce(own, op=mpistrat.Sum, name="a")
            assert (total == size * step + size * (size - 1) / 2).all()
        elif kind == "broadcast":
            assert (mpistrat.broadcast(own, 0, name="a") == step).all()
        else:
            gathered = mpistrat.allgather(own, name="a").reshape(size, -1)
            assert (gathered == step + np.arange(size)[:, None]).all()


def run() -> None:
    for step in range(TIMES):
        if rank == 0 and step == 2:
            if when == "within":
                threading.Thread(target=cut_once, args=(sent() + min(nbytes // 4, 10**6),), daemon=True).start()
            elif when == "between" and for_s:
                threading.Thread(target=cut).start()
            elif when == "between":
                cut()
        once(step)


def tell(error: BaseException) -> None:
    """Put an error where it is read even if the launcher is out of reach."""
    (directory / str(rank)).write_text(f"{time.time()} {type(error).__name__}: {error}")


def tell_and_end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What is done about an error that is not caught."""
    tell(error)
    hook(kind, error, trace)


mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
hook, sys.excepthook = sys.excepthook, tell_and_end
for step in range(WARM_UP):
    once(step)
began = time.monotonic()
if not caught:
    run()
    say(f"{TIMES} times in {time.monotonic() - began:.3f} s")
else:
    try:
        run()
    except mpistrat.CollectiveError as error:
        tell(error)
