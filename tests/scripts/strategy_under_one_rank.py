"""Rank 0 alone does what all ranks have to do, and the others go on; timeout_seconds ends that.

usage: strategy_under_one_rank.py metric|variable|checkpoint|save|evaluate|save-at-the-end DIRECTORY
"""

import sys
from typing import Any

import keras
import tensorflow as tf
from reporting import attempt, launched_rank, say

from mpistrat.tensorflow import MPIStrategy

what, directory = sys.argv[1:]
strategy = MPIStrategy(tf.distribute.experimental.CommunicationOptions(timeout_seconds=3))
with strategy.scope():
    metric = keras.metrics.Mean()
    seen = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
strategy.run(lambda: metric.update_state(1.0))


def save() -> bool:
    model.save(f"{directory}/model.keras")
    return True


def make_variable() -> str:
    with strategy.scope():
        return tf.Variable(1.0, name="one_more").name


def fit(**callbacks: Any) -> str:
    x = tf.ones([4, 2])
    model.fit(x, x[:, :1], verbose=0, callbacks=[keras.callbacks.LambdaCallback(**callbacks)])
    return "trained"


def add_up() -> None:
    strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0)))


def evaluate(epoch: int, logs: dict) -> None:
    model.evaluate(tf.ones([4, 2]), tf.ones([4, 1]), verbose=0)


actions = {"variable": make_variable, "metric": lambda: float(metric.result()), "save": save, "save-at-the-end": save,
           "checkpoint": lambda: tf.train.Checkpoint(seen=seen).save(f"{directory}/ckpt"),
           "evaluate": lambda: fit(on_epoch_end=evaluate)}
if launched_rank() == 0:
    attempt(actions[what])
elif what == "evaluate":
    attempt(lambda: (fit(), add_up()))
elif what != "save-at-the-end":
    attempt(add_up)
say("ends")
