"""How the chief of a cluster ends is named in the argument; the other ranks wait for it and say what they saw."""

import os
import signal
import sys
import time

from reporting import attempt, say

import mpistrat
from mpistrat.cluster import form


def fail_on_purpose() -> None:
    raise RuntimeError("failed on purpose")


def reduce_without_the_others() -> None:
    attempt(lambda: mpistrat.barrier("lonely"))


way, = sys.argv[1:]
mpistrat.init()
cluster = form({"chief": 1, "worker": mpistrat.size() - 2, "ps": 1})
if cluster.role is not mpistrat.Role.CHIEF:
    say(f"returned {cluster.wait_for_chief(0.0)}")
    attempt(cluster.wait_for_chief)
    say("ends")
    sys.exit()
time.sleep(0.5)
{
    "ends": lambda: None,
    "closes": cluster.close,
    "shuts down": mpistrat.shutdown,
    "calls a barrier": reduce_without_the_others,
    "raises": fail_on_purpose,
    "exits with 3": lambda: sys.exit(3),
    "gets SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
}[way]()
say("ends")
