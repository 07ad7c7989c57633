"""Counts in a loop of steps how often each row of a dataset was trained, while ranks of an elastic job end.

usage: mpistrat run --elastic -np 3 python tests/scripts/elastic_steps.py [--kill GENERATION:RANK:STEP:WHEN ...]
           [--epochs N] [--pause S] [--log FILE]

WHEN is where in the step the rank kills itself: "before" the reduction, "after" it, or "while" it commits. Before the
reduction, "stop" stops its process, "host" kills all processes of its network namespace, and "cut" takes down its link.
The ranks of the last generation print how often the rows were trained, and the steps.
"""

import argparse
import os
import signal
import subprocess
import threading
import time
from typing import Any

import numpy as np

import mpistrat as hvd
from mpistrat.api.elastic import ElasticSampler, ObjectState, run
from mpistrat.elastic import membership

ROWS, BATCH = 60, 2
parser = argparse.ArgumentParser()
parser.add_argument("--kill", nargs="*", default=[])
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--log")
options = parser.parse_args()
kills = [(int(g), int(r), int(s), when) for g, r, s, when in (each.split(":") for each in options.kill)]
hvd.init()
own = membership.current()
generation = own.job.generation if own is not None else 0
steps_here = 0


def log(text: str) -> None:
    if options.log:
        with open(options.log, "a", encoding="utf-8") as file:
            file.write(f"{time.time():.3f} {hvd.rank()} {hvd.size()} {generation} {text}\n")


def lose_host() -> None:
    """Kill all processes of this host, this one last."""
    here = os.readlink("/proc/self/ns/net")
    # A host that is lost does nothing more. So all of them stop before the first one ends, which others would notice.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in (1, os.getpid())]:
            try:
                if os.readlink(f"/proc/{pid}/ns/net") == here:
                    os.kill(pid, number)
            except OSError:
                pass  # It has ended.
    os.kill(os.getpid(), signal.SIGKILL)


def perhaps_die(when: str, delay_s: float = 0.0) -> None:
    if (generation, hvd.rank(), steps_here, when) in kills:
        if delay_s:
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        else:
            os.kill(os.getpid(), signal.SIGKILL)


log(f"pid {os.getpid()} of rank {hvd.rank()}")


@run
def train(state: Any) -> None:
    global steps_here
    log(f"begins at step {state.step}")
    while state.epoch < options.epochs:
        rows = list(state.sampler)
        for start in range(0, len(rows), BATCH):
            steps_here += 1
            perhaps_die("before")
            if (generation, hvd.rank(), steps_here, "stop") in kills:
                os.kill(os.getpid(), signal.SIGSTOP)
            if (generation, hvd.rank(), steps_here, "host") in kills:
                log("loses its host")
                lose_host()
            if (generation, hvd.rank(), steps_here, "cut") in kills:
                log("loses the link")
                subprocess.run(["ip", "link", "set", "cable", "down"], check=True)
            mine = np.zeros(ROWS)
            np.add.at(mine, rows[start:start + BATCH], 1)
            state.counts += hvd.allreduce(mine, op=hvd.Sum, name="rows")
            state.step += 1
            state.sampler.record_indices(rows[start:start + BATCH])
            perhaps_die("after")
            perhaps_die("while", 0.0005)
            log(f"step {state.step}")
            time.sleep(options.pause)
            state.commit()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)


state = ObjectState(epoch=0, step=0, counts=np.zeros(ROWS), sampler=ElasticSampler(range(ROWS)))
train(state)
counts = state.counts.astype(int)
print(f"rank {hvd.rank()}: of {hvd.size()}, generation {generation}, step {state.step}, each row at least "
      f"{counts.min()} times, {counts.sum() - options.epochs * ROWS} more in all", flush=True)
