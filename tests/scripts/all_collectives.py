"""Every collective, with arrays of 0 bytes to 8 MiB; each rank checks its own results and says what it has checked."""

import functools
import platform
import random

import numpy as np
from reporting import say

import mpistrat

mpistrat.init()
rank, size = mpistrat.rank(), mpistrat.size()
LENGTHS = [0, 1, 3, 1000, 10_007, 2**20]  # of float64


def values(of_rank: int, length: int) -> np.ndarray:
    """Numbers whose sum depends on the order of summation."""
    return np.random.default_rng([of_rank, length]).standard_normal(length)


def summed(arrays: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


# Over the ranks of each host in their order, and then over the hosts in theirs.
host_of = mpistrat.allgather_object(platform.node())
hosts = [[r for r in range(size) if host_of[r] == host] for host in dict.fromkeys(host_of)]
for length in LENGTHS:
    expected = summed([summed([values(r, length) for r in ranks]) for ranks in hosts])
    np.testing.assert_array_equal(mpistrat.allreduce(values(rank, length), op=mpistrat.Sum), expected)
say("allreduce")

for length in LENGTHS:
    # Rank r brings r times the rows, so rank 0 brings none.
    expected = np.concatenate([values(r, length * r // size) for r in range(size)])
    np.testing.assert_array_equal(mpistrat.allgather(values(rank, length * rank // size)), expected)
say("allgather")

for root in range(size):
    for length in LENGTHS:
        np.testing.assert_array_equal(mpistrat.broadcast(values(rank, length), root), values(root, length))
say("broadcast")

for root in range(size):
    assert mpistrat.broadcast_object({"from": rank, "text": "x" * 300_000 * rank}, root) == {
        "from": root, "text": "x" * 300_000 * root}
assert mpistrat.allgather_object("x" * 100_000 * rank) == ["x" * 100_000 * r for r in range(size)]
say("objects")

mine = random.Random(rank)
for _ in range(5):
    names = [f"gradient.{i}" for i in range(40)]
    mine.shuffle(names)
    pending = {name: mpistrat.allreduce_async(np.full(100, int(name.split(".")[1]) + rank), name=name, op=mpistrat.Sum)
               for name in names}
    mine.shuffle(names)
    for name in names:
        total = int(name.split(".")[1]) * size + size * (size - 1) // 2
        np.testing.assert_array_equal(pending[name].wait(), np.full(100, total))
say("another order on each rank")

for _ in range(200):
    mpistrat.barrier()
say("barriers")
