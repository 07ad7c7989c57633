"""Says which of the descriptors that init() has opened a program has that this rank starts."""

import subprocess
import sys

from reporting import descriptors, say

import mpistrat

if sys.argv[1:] == ["list"]:
    print(*descriptors(), sep="\n")
    sys.exit()
import mpi4py.MPI  # noqa: F401 - here, so that what MPI opens itself is not counted

before = descriptors()
mpistrat.init()
ours = descriptors() - before
program = subprocess.run([sys.executable, __file__, "list"], close_fds=False, stdout=subprocess.PIPE, text=True,
                         check=True)
say(f"opened {bool(ours)}, inherited {sorted(ours & set(program.stdout.splitlines()))}")
