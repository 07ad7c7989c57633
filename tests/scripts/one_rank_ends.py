"""Rank 1 ends in the way that is named first, and puts the time into the file that is named third.

What the other ranks do meanwhile is named second.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
from reporting import launched_rank, say

import mpistrat


def fail_on_purpose() -> None:
    raise RuntimeError("failed on purpose")


def raise_system_exit() -> None:
    raise SystemExit(3)


def exit_in_thread() -> None:
    """Ends the thread only. The script ends well, and too early."""
    thread = threading.Thread(target=sys.exit, args=[3])
    thread.start()
    thread.join()


def press_ctrl_c() -> None:
    """The launcher gets SIGINT, but not its ranks, which are in process groups of their own."""
    launchers = [p for p in psutil.Process().parents() if p.name() in ("mpirun", "prterun", "mpiexec", "mpiexec.hydra")]
    launchers[-1].send_signal(signal.SIGINT)
    time.sleep(600)


way, others, mark = sys.argv[1:]
ways = {
    "raises": fail_on_purpose, "raises before init": fail_on_purpose,
    "fails in init": lambda: mpistrat.init(comm=[0]), "exits with 3": lambda: sys.exit(3),
    "raises SystemExit(3)": raise_system_exit, "exits with 3 from a thread": exit_in_thread,
    "exits with 3 at once": lambda: os._exit(3), "gets SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "gets SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT), "presses Ctrl-C": press_ctrl_c,
}

if way not in ("raises before init", "fails in init"):
    mpistrat.init()
    mpistrat.barrier()
if launched_rank() == 1:
    Path(mark).write_text(str(time.time()))
    ways[way]()
elif others == "wait in init":
    mpistrat.init()
elif others == "wait for it":
    mpistrat.allreduce(np.ones(4), name="sum")
elif others == "are busy":
    time.sleep(600)
else:
    assert others == "end too"
    say("ends well")
