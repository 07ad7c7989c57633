"""Run a script in which a rank is killed once the chief has printed a line that begins as asked.

    killed_rank.py RANK BEGINNING MARK SCRIPT [ARGUMENTS]

MARK is a file that does not exist; by it the rank learns that the line has been printed.
"""

import builtins
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from reporting import launched_rank, say

rank, beginning, mark, script, *arguments = sys.argv[1:]
plain_print = builtins.print


def print_and_mark(*texts: object, **options: object) -> None:
    plain_print(*texts, **options)
    if str(texts[0]).startswith(beginning):
        Path(mark).touch()


def die_when_marked() -> None:
    while not Path(mark).exists():
        time.sleep(0.02)
    say("is killed")
    os.kill(os.getpid(), signal.SIGKILL)


if launched_rank() == 0:
    builtins.print = print_and_mark
if launched_rank() == int(rank):
    threading.Thread(target=die_when_marked, daemon=True).start()
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
