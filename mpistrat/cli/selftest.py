"""An all-reduce with a known result: `mpirun -np 2 python -m mpistrat.cli.selftest 2`, for `mpistrat check -np 2`.

Started by check.py, under mpirun.
"""

import statistics
import sys
import time

import numpy as np

import mpistrat

from .arguments import counted

COUNT = 1024  # float32 elements
ROUNDS = 50
WARM_UP_ROUNDS = 5


def main(expected_ranks: int) -> int:
    """Return 0 if the number of ranks and the sum are right, else 1. Collective; rank 0 prints one line."""
    mpistrat.init()
    rank, size = mpistrat.rank(), mpistrat.size()
    if size != expected_ranks:
        print(f"  wrong: this process sees {counted(size, 'rank')}, {expected_ranks} were started. mpirun belongs to "
              "another MPI than the library that mpi4py has loaded.")
        return 1
    array = np.arange(COUNT, dtype=np.float32) + rank
    # All terms are small integers, so the sum is exact in float32.
    right = size * np.arange(COUNT, dtype=np.float32) + size * (size - 1) / 2
    seconds = []
    is_right = True
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        began = time.perf_counter()
        result = mpistrat.allreduce(array, op=mpistrat.Sum, name="selftest")
        seconds.append(time.perf_counter() - began)
        is_right = is_right and bool(np.array_equal(result, right))
    is_right_everywhere = all(mpistrat.allgather_object(is_right))
    if rank == 0:
        microseconds = 1e6 * statistics.median(seconds[WARM_UP_ROUNDS:])
        print(f"  {'right' if is_right_everywhere else 'wrong'}: {counted(size, 'rank')} on "
              f"{counted(len(mpistrat.hosts()), 'host')} ({', '.join(mpistrat.hosts())}), {microseconds:.0f} us for "
              f"{array.nbytes} bytes", flush=True)
    mpistrat.shutdown()
    return 0 if is_right_everywhere else 1


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
