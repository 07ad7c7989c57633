"""Train programs in all legs, one after the other in the same processes; goes on after one that fails.

    mpistrat run -np 2 -- python -m tests.programs.differential "adam" "tape"
    mpistrat run -np 3 -- python -m tests.programs.differential --but "resnet50"

Exits with the names of those that have failed, on all ranks. Programs that TensorFlow does not repeat bit by bit
(ResNet-50) are compared among the legs with TF_NUM_INTEROP_THREADS=1 only, with which it does. An operation that adds
in no fixed order is seen with several threads only: MPISTRAT_BIND=gpu TF_NUM_INTRAOP_THREADS=4.
"""

import argparse
import sys
import time
import traceback

from mpi4py import MPI

from tests.programs.differential.check import assert_same_in_all_legs
from tests.programs.differential.programs import PROGRAMS

parser = argparse.ArgumentParser(prog="python -m tests.programs.differential", description=__doc__,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(map(repr, PROGRAMS))}")
parser.add_argument("--but", nargs="+", metavar="NAME", default=[], help="all programs but these")
parser.add_argument("--no-xla", action="store_true", help="leave out the legs of XLA; to compile takes longer than all")
options = parser.parse_args()
failed = []
for name in options.names or [name for name in PROGRAMS if name not in options.but]:
    began = time.monotonic()
    try:
        assert_same_in_all_legs(name, with_xla=not options.no_xla)
        outcome = f"{name!r} is the same"
    except AssertionError as error:
        traceback.print_exc()
        failed.append(name)
        outcome = f"{name!r} FAILED: {error}"
    if MPI.COMM_WORLD.Get_rank() == 0:
        print(f"{outcome} ({time.monotonic() - began:.1f} s)", flush=True)
sys.exit(f"FAILED: {failed}" if failed else None)
