"""Sums while a process of another user writes to every socket of the job that has a name.

Arguments: how many seconds the stranger has.
"""

import os
import sys
import time

import numpy as np

import mpistrat as hvd
from tests.support import strangers

hvd.init()
processes = hvd.allgather_object(os.getpid())
stranger = strangers.start(float(sys.argv[1]), strangers.names_of(*processes)) if hvd.rank() == 0 else None
if stranger is not None:
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "ready\n"
rounds = 0
while True:
    is_over = stranger is not None and stranger.poll() is not None
    # New names at every round, so that messages go both ways; now and then every rank sleeps.
    total = hvd.allreduce(np.array([float(is_over), 1.0]), op=hvd.Sum, name=f"round {rounds}")
    assert total[1] == hvd.size(), total
    rounds += 1
    if total[0]:
        break
    if rounds % 50 == 0:
        time.sleep(0.01)
if stranger is not None:
    print(f"rank 0: {stranger.stdout.read().strip()}", flush=True)
    assert stranger.returncode == 0
print(f"rank {hvd.rank()}: done", flush=True)
