"""How a process that a script has forked ends."""

import os
import time

LIMIT_S = 30


def exit_status(child: int) -> str:
    """How the child ended; it is killed if it has not within the limit."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return f"the child ended with {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.05)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "the child hangs"
