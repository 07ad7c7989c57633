"""Checked all-reduces of several sizes, again and again.

Says which backend is used, whether the ranks have voted on operations, and whether memory grows.

usage: many_allreduces.py TIMES [RANKS_PER_HOST]

With RANKS_PER_HOST so many consecutive ranks each form a host that is made up.
"""

import resource
import sys

import numpy as np
from reporting import say

import mpistrat
from mpistrat.api import runtime
from mpistrat.core.handle import Entry
from mpistrat.negotiation.fast_path import FastPath
from tests.support.pretended_hosts import pretend_hosts

times, *ranks_per_host = map(int, sys.argv[1:])
if ranks_per_host:
    pretend_hosts(*ranks_per_host)
votes: list[int] = []
vote = FastPath.vote


def count_vote(self: FastPath, entry: Entry | None, is_ready: bool, now: float) -> None:
    """Vote as the product does, and remember it."""
    votes.append(0 if entry is None else entry.request.fingerprint)
    vote(self, entry, is_ready, now)


FastPath.vote = count_vote
mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
SIZES = [1, 1000, 30_000, 300_000]
arrays = [np.full(elements, rank + 1, np.float32) for elements in SIZES]


def once() -> None:
    for i, array in enumerate(arrays):
        assert (mpistrat.allreduce(array, name=f"single.{i}", op=mpistrat.Sum) == size * (size + 1) / 2).all()
    for result in mpistrat.grouped_allreduce(arrays, name="together"):
        assert (result == (size + 1) / 2).all()


for _ in range(100):
    once()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(times):
    once()
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
say(f"{runtime.current().data_name} with{'' if votes else 'out'} votes {'grows' if grown > 4096 else 'stays'}")
