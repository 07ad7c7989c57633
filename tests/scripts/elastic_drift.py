"""A loop of an elastic job in which the weights of rank 0 drift apart before the second commit of the first generation.

usage: mpistrat run --elastic -np 3 python tests/scripts/elastic_drift.py
"""

from typing import Any

import tensorflow as tf

import mpistrat.tensorflow as hvd
from mpistrat.elastic import membership

hvd.init()
job = membership.current().job
shared, own = tf.Variable([1.0, 2.0], name="shared"), tf.Variable(0.0, name="own")
statistics = tf.Variable(0.0, trainable=False, name="statistics")


@hvd.elastic.run
def train(state: Any) -> None:
    tape = hvd.DistributedGradientTape(tf.GradientTape())
    tape.register_local_source(own)
    own.assign(float(hvd.rank()))
    statistics.assign(float(hvd.rank()))
    while state.step < 3:
        state.step += 1
        shared.assign_add([1.0, 1.0])
        if state.step == 2 and hvd.rank() == 0 and job.generation == 1:
            shared.assign_add([0.0, 1.0])
        state.commit()
        print(f"rank {hvd.rank()}: after commit {state.step} {shared.numpy().tolist()}, own {own.numpy():g}, "
              f"statistics {statistics.numpy():g}", flush=True)
    shared.assign([0.0, 0.0])
    state.restore()
    print(f"rank {hvd.rank()}: restored {shared.numpy().tolist()}", flush=True)


train(hvd.elastic.TensorFlowState([shared, own, statistics], step=0))
