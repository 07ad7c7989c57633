"""Says which of the descriptors that init() has opened a program has that this rank starts."""

import os
import subprocess
import sys

from reporting import say

import mpistrat


def descriptors() -> set[str]:
    """What this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # of the listing itself
            continue
    return found


if sys.argv[1:] == ["list"]:
    print(*descriptors(), sep="\n")
    sys.exit()
import mpi4py.MPI  # noqa: E402, F401 - here, so that what MPI opens itself is not counted

before = descriptors()
mpistrat.init()
ours = descriptors() - before
program = subprocess.run([sys.executable, __file__, "list"], close_fds=False, stdout=subprocess.PIPE, text=True,
                         check=True)
say(f"opened {bool(ours)}, inherited {sorted(ours & set(program.stdout.splitlines()))}")
