"""Collectives that threads wait for at once, or several at a time, on ranks that are sometimes late.

So ranks agree by vote and by messages in turn. Every result is checked.

usage: waits_of_all_kinds.py STEPS THREADS
"""

import random
import sys
import threading
import time

import numpy as np

import mpistrat as ms

LATE_S = 0.06  # longer than a vote stays unanswered


def sum_of_ranks(value: float) -> float:
    return ms.size() * value + ms.size() * (ms.size() - 1) / 2


def run(thread: int, steps: int) -> None:
    """The same collectives on all ranks, but not in the same time and order."""
    alike, own = random.Random(thread), random.Random(f"{thread} {ms.rank()}")
    for step in range(steps):
        kind, elements = alike.random(), alike.choice([1, 7, 3000, 100_000])
        if own.random() < 0.02:
            time.sleep(LATE_S * own.random())
        values = np.full(elements, float(step + ms.rank()), np.float32)
        if kind < 0.6:
            result = ms.allreduce(values, name=f"{thread}.alone", op=ms.Sum)
            assert (result == sum_of_ranks(step)).all(), (thread, step)
        elif kind < 0.8:
            order = own.sample(range(3), 3)
            handles = [ms.allreduce_async(values + k, name=f"{thread}.of three.{k}", op=ms.Sum) for k in order]
            for k, handle in zip(order, handles, strict=True):
                assert (handle.wait() == sum_of_ranks(step + k)).all(), (thread, step, k)
        elif kind < 0.9:
            root = step % ms.size()
            assert (ms.broadcast(values, root_rank=root, name=f"{thread}.root") == step + root).all(), (thread, step)
        else:
            rows = ms.allgather(np.full((ms.rank() + 1, 2), ms.rank(), np.int64), name=f"{thread}.rows")
            assert rows.sum() == 2 * sum(r * (r + 1) for r in range(ms.size())), (thread, step)


def main() -> None:
    steps, count = int(sys.argv[1]), int(sys.argv[2])
    ms.init()
    failed: list[threading.ExceptHookArgs] = []
    threading.excepthook = failed.append
    run(0, steps)
    threads = [threading.Thread(target=run, args=(number, steps)) for number in range(1, count + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit(f"rank {ms.rank()}: {failed[0].exc_value!r}")
    print(f"rank {ms.rank()}: {steps} steps in one thread, and in {count}")
    ms.shutdown()


if __name__ == "__main__":
    main()
