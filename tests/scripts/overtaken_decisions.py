"""Decisions that do not fit into the ring between two ranks follow on others while votes are open; no rank may hang.

In each round every rank waits for one small sum after the other, so that the ranks vote, while a second thread submits
a sum of new tensors with long labels: what rank 0 decides on that is larger than the ring. On some ranks a thread keeps
the interpreter lock, so that these are late for everything.

usage: overtaken_decisions.py ROUNDS RANKS_PER_HOST [FAN_OUT]

With FAN_OUT a rank has no more children than that in the tree of messages: with 1, rank 1 is rank 2's parent.
"""

import sys
import threading
import time

import numpy as np

import mpistrat
from mpistrat.api import runtime
from mpistrat.core.request import ScaledOp, Sum, allreduce_request, specs_of
from mpistrat.negotiation import subtree
from tests.support.pretended_hosts import pretend_hosts

NEW_TENSORS = 300
BUSY_S = 10e-3
rounds, ranks_per_host = int(sys.argv[1]), int(sys.argv[2])
subtree.FAN_OUT = int(sys.argv[3]) if len(sys.argv) > 3 else subtree.FAN_OUT
pretend_hosts(ranks_per_host)
mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
engine = runtime.current().engine
has_submitted = threading.Event()


def keep_busy() -> None:
    """Hold the interpreter lock, but for the moments in which Python takes it away, after each submission."""
    while has_submitted.wait():
        has_submitted.clear()
        until = time.monotonic() + BUSY_S
        while time.monotonic() < until:
            sum(range(2000))


def submit_many(number: int) -> None:
    """Submit a small sum, and a sum of tensors that no rank has seen, whose description takes about 90 KiB."""
    small = [np.full(3, float(rank))]
    many = [np.full(2, float(rank + i)) for i in range(NEW_TENSORS)]
    labels = tuple(f"model/block_{i}/{'x' * 250}/kernel_{number}" for i in range(NEW_TENSORS))
    if rank == size - 1:
        time.sleep(3e-3)
    handles = [engine.submit(allreduce_request(f"small/{number}", specs_of(small), ScaledOp(Sum)), small)]
    has_submitted.set()
    time.sleep(1e-3)
    request = allreduce_request(f"many/{number}", specs_of(many), ScaledOp(Sum), labels=labels)
    handles.append(engine.submit(request, many))
    ranks = size * (size - 1) / 2
    assert (handles[0].wait(60)[0] == ranks).all()
    for i, result in enumerate(handles[1].wait(60)):
        assert (result == ranks + i * size).all()


if rank % ranks_per_host == 0 and rank > 0:
    sys.setswitchinterval(1e-3)
    threading.Thread(target=keep_busy, daemon=True).start()
for number in range(rounds):
    submitter = threading.Thread(target=submit_many, args=(number,))
    for step in range(3):
        assert mpistrat.allreduce(np.float64(rank), op=Sum, name=f"awaited/{step}") == size * (size - 1) / 2
        if step == 0:
            submitter.start()
    submitter.join()
print(f"rank {rank}: {rounds} rounds are right", flush=True)
