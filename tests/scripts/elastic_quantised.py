"""A loop of an elastic job with 8-bit gradients between made-up hosts, in which the last rank dies in the fifth step.

usage: mpistrat run --elastic -np 3 python tests/scripts/elastic_quantised.py

In the first generation each rank is a host of its own; in later ones the first two share a host. At the end each rank
prints how far the sum of all gradients, with what is still to be added, is from that of exact ones.
"""

import os
import signal
from typing import Any

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd
from mpistrat.api import runtime
from mpistrat.elastic import membership

STEPS = 8


def hosts_of(names: list[str], groups: object) -> list[str]:
    ranks_of_host = 1 if membership.current().job.generation == 1 else 2
    return [f"host {rank // ranks_of_host}" for rank in range(len(names))]


runtime.unique_hosts = hosts_of
os.environ["MPISTRAT_BIND"] = "gpu"  # The hosts share the cores of one.
hvd.init()
generation = membership.current().job.generation
values = np.full([100, 100], 0.001, np.float32)  # a quarter of a quantum
values[:, ::25] = 1.0
variable = tf.Variable(tf.ones([100, 100]), name="kernel")


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < STEPS:
        with hvd.DistributedGradientTape(tf.GradientTape(), compression=hvd.Compression.int8, op=hvd.Sum) as tape:
            loss = tf.reduce_sum(variable * values)
        gradient = tape.gradient(loss, variable).numpy()
        if (generation, hvd.rank(), state.step) == (1, 2, 4):
            os.kill(os.getpid(), signal.SIGKILL)
        state.off = state.off + hvd.size() * values - gradient
        state.step += 1
        state.commit()


state = hvd.elastic.TensorFlowState([variable], step=0, off=np.zeros([100, 100], np.float32))
train(state)
kept = hvd.Compression.error_feedback()["tape[0]"].reshape(100, 100)
print(f"rank {hvd.rank()}: of {hvd.size()} on {len(hvd.hosts())} hosts, generation {generation}, rounded off "
      f"{np.abs(kept).max():.4f}, lost {np.abs(state.off - kept).max():.4f}", flush=True)
