"""What a commit costs: the milliseconds that commit() takes, those until the commit is kept, and of a step meanwhile.

usage: mpistrat run --elastic -np 2 python tests/scripts/commit_cost.py MEGABYTES
"""

import statistics
import sys
import time

import numpy as np
import tensorflow as tf

import mpistrat.tensorflow as hvd
from mpistrat.elastic import membership

hvd.init()
own = membership.current()
assert own is not None, "start it with mpistrat run --elastic"
count = int(float(sys.argv[1]) * 1e6 / 4)
variables = [tf.Variable(tf.ones([count // 8])) for _ in range(8)]
state = hvd.elastic.TensorFlowState(variables, step=0)
gradients = [tf.ones([1000]) for _ in range(8)]


@tf.function
def step() -> tf.Tensor:
    """Update all variables, with an all-reduce of little."""
    means = hvd.grouped_allreduce(gradients, name="g")
    for variable in variables:
        variable.assign_sub(variable * 0.001)
    return tf.add_n([tf.reduce_sum(mean) for mean in means])


def timed(action) -> float:  # type: ignore[no-untyped-def]
    """The milliseconds that an action takes."""
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e3


def train() -> None:
    """A step, until it is done."""
    step().numpy()


def median(values: list[float]) -> str:
    """For people."""
    return f"{statistics.median(values):.1f}"


state.commit()
own.finish()
plain = [timed(train) for _ in range(12)][2:]
commits, kept, during = [], [], []
for _ in range(10):
    began = time.perf_counter()
    commits.append(timed(state.commit))
    during.append(timed(train))
    own.finish()
    kept.append((time.perf_counter() - began) * 1e3)
    hvd.barrier()
if hvd.rank() == 0:
    nbytes = sum(np.prod(variable.shape) * 4 for variable in variables)
    print(f"{nbytes / 1e6:.0f} MB: commit() {median(commits)} ms, kept after {median(kept)} ms; "
          f"a step {median(plain)} ms, the step after a commit {median(during)} ms", flush=True)
