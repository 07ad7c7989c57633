"""Programs of tests/differential, one after the other in the same processes; goes on after one that fails.

usage: differential.py NAME...

A name is that of a program, or `seed N` for a random model. Exits with 1, on all ranks, if any program has failed.
"""

import sys
import time

from mpi4py import MPI

from tests.differential.check import assert_same_in_all_legs

rank, failed = MPI.COMM_WORLD.Get_rank(), 0
for name in sys.argv[1:]:
    began = time.monotonic()
    try:
        assert_same_in_all_legs(name)
        outcome = f"{name!r} is the same"
    except AssertionError as error:
        failed += 1
        outcome = f"{name!r} FAILED: {error}"
    if rank == 0:
        print(f"{outcome} ({time.monotonic() - began:.1f} s)", flush=True)
sys.exit(failed > 0)
