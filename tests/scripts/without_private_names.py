"""Collectives with each private name of the bridge missing in turn while mpistrat is imported, as if it had moved.

For each name it prints the names that the bridge misses, whether a callback of eager tensors in a graph and
asynchronous execution work, and the error of a collective in a function that XLA compiles.
"""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import gradient_registry

NAMES = {
    "tensorflow.python.ops.control_flow_util": ["GraphOrParentsInXlaContext"],
    "tensorflow.python.eager.record": ["could_possibly_record", "record_operation"],
    "tensorflow:Operation": ["_set_attr"],
    "tensorflow.python.ops.script_ops": ["EagerFunc"],
    "tensorflow.python.ops.script_ops:FuncRegistry": ["insert"],
    "tensorflow.python.pywrap_tfe": ["TFE_ContextGetExecutorForThread", "TFE_ContextSetExecutorForThread",
                                     "TFE_ExecutorIsAsync", "TFE_DeleteExecutor", "TFE_NewExecutor"],
    "tensorflow.python.eager.context:Context": ["ensure_initialized", "_handle"],
}


def import_without(place: str, name: str) -> None:
    module, _, owner = place.partition(":")
    holder = importlib.import_module(module)
    holder = getattr(holder, owner) if owner else holder
    taken = getattr(holder, name)
    delattr(holder, name)
    try:
        importlib.import_module("mpistrat.keras")
    finally:
        setattr(holder, name, taken)


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "mpistrat"]:
        del sys.modules[name]
    gradient_registry._registry.pop("MpistratCollective")


def run_collectives() -> None:
    """Eager, in functions, with first and second gradients, and in fit. One rank."""
    import mpistrat.keras as hvd
    import mpistrat.tensorflow as hvt
    variable = tf.Variable([1.0, 2.0])

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                y = hvt.allreduce(variable, op=hvt.Sum, name="y", prescale_factor=3.0) ** 2
            first = tape.gradient(y, variable)
        return y, first, outer.gradient(first, variable)

    for call in (step, tf.function(step)):
        np.testing.assert_array_equal(call(), [[9, 36], [18, 36], [18, 18]])
    whole = tf.function(lambda: hvt.allgather(variable, name="whole"))
    with tf.GradientTape() as tape:  # Outside of the function that has the collective.
        loss = tf.reduce_sum(whole() ** 2)
    np.testing.assert_array_equal(tape.gradient(loss, variable), [2, 4])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    model.fit(np.ones((4, 2)), np.ones(4), verbose=0)


def outcome(call: Callable[[], Any]) -> str:
    try:
        assert call()
    except ImportError as error:
        return f"{type(error).__name__}: {error}"
    return "works"


def error_under_xla() -> str:
    import mpistrat.tensorflow as hvt
    try:
        tf.function(lambda: hvt.allreduce(tf.ones(2), name="compiled"), autograph=False, jit_compile=True)()
    except (ValueError, tf.errors.OpError) as error:
        return type(error).__name__
    return ""


def report() -> list[Any]:
    import mpistrat.keras as hvd
    from mpistrat.tensorflow.bridge._private import missing
    from mpistrat.tensorflow.bridge.own_executor import is_asynchronous
    from mpistrat.tensorflow.bridge.python_op import unordered_tensor_call
    hvd.init()
    run_collectives()
    called = tf.function(lambda: unordered_tensor_call(lambda x: [x + 1], [tf.constant(1)], [tf.int32], "CPU:0"),
                         autograph=False)
    on_gpu = outcome(lambda: called()[0] == 2)
    tf.config.experimental.set_synchronous_execution(False)
    asynchronous = outcome(is_asynchronous)
    tf.config.experimental.set_synchronous_execution(True)
    xla = error_under_xla()
    hvd.shutdown()
    return [list(missing), on_gpu, asynchronous, xla]


for place, names in NAMES.items():
    for name in names:
        import_without(place, name)
        print(f"{name}: {json.dumps(report())}", flush=True)
        forget()
