"""Run random programs as tests/programs/random_collectives/__init__.py says."""

import importlib
import os
import sys

import pytest
import tensorflow as tf

way, *arguments = sys.argv[1:]
count, first = [int(word) for word in [*(word for word in arguments if word.isdigit()), "0"]][:2]
options = frozenset(word for word in arguments if not word.isdigit())
tf.config.threading.set_inter_op_parallelism_threads(1)
if "compiled" in options:
    tf.config.threading.set_intra_op_parallelism_threads(1)
tf.get_logger().setLevel("ERROR")  # It warns of functions that are traced often, which is the purpose.

import mpistrat.tensorflow as hvd  # noqa: E402 - the pool is made on first use
from tests.support import tensorflow_stand_in  # noqa: E402
from tests.support.pretended_hosts import pretend_hosts  # noqa: E402

# In some programs a rank waits for others that have ended.
os.environ.setdefault("MPISTRAT_STALL_CHECK_TIME_SECONDS", "10")
os.environ.setdefault("MPISTRAT_STALL_SHUTDOWN_TIME_SECONDS", "30")
if "hosts" in options:
    pretend_hosts(2)
hvd.init()
rank = hvd.rank()
run = importlib.import_module(f"tests.programs.random_collectives.{way}").run
with pytest.MonkeyPatch.context() as patch:
    if "gpu" in options:
        tensorflow_stand_in.install(rank, patch.setattr)
    for number in range(first, first + count):
        run(number, options)
    hvd.shutdown()
print(f"rank {rank}: {count} programs are right", flush=True)
