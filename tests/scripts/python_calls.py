"""Print the Python calls of mpistrat on the ways that a reader, and a small operation, goes most.

    mpirun -np 2 python tests/scripts/python_calls.py

A call is that of a function or generator in the package, on the thread that makes or runs the operation. For each way
rank 0 prints the smallest number of several runs, and the number of modules: a run in which the other rank came late
has more. docs/contributing.md has the limits.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import mpistrat
import mpistrat.keras
import mpistrat.tensorflow as hvd
from mpistrat.tensorflow.graph import cpu

PACKAGE = str(Path(mpistrat.__file__).parent)
RUNS = 20


class Calls:
    """The calls on one thread while the context lasts."""

    def __enter__(self) -> "Calls":
        self.modules: list[str] = []
        sys.setprofile(self._note)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: object, event: str, argument: object) -> None:
        path = frame.f_code.co_filename  # type: ignore[attr-defined]
        if event == "call" and path.startswith(PACKAGE):
            self.modules.append(f"{path[len(PACKAGE) + 1:]}:{frame.f_code.co_name}")  # type: ignore[attr-defined]


def fewest(way: Callable[[], list[str]]) -> list[str]:
    return min((way() for _ in range(RUNS)), key=len)


def eager() -> list[str]:
    array = np.ones(256, np.float32)
    with Calls() as calls:
        hvd_array.allreduce(array, name="eager")
    return calls.modules


def in_function() -> list[str]:
    """The calls of the callback, which TensorFlow makes on a thread of its own."""
    step(tf.ones(256))
    return in_callbacks.pop()


def traced() -> list[str]:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def apply() -> None:
        optimizer.apply([tf.ones_like(variable) for variable in model.trainable_variables])

    with Calls() as calls:
        apply.get_concrete_function()
    return calls.modules


in_callbacks: list[list[str]] = []
submit = cpu._CpuCallSite.submit


def counted(self: cpu._CpuCallSite, *inputs: np.ndarray) -> object:
    with Calls() as calls:
        result = submit(self, *inputs)
    in_callbacks.append(calls.modules)
    return result


cpu._CpuCallSite.submit = counted  # type: ignore[method-assign, assignment]
hvd_array = mpistrat
hvd.init()
step = tf.function(lambda x: hvd.allreduce(x, name="graph"), autograph=False)
for _ in range(20):
    step(tf.ones(256))
in_callbacks.clear()
for name, way in {"eager allreduce of an array": eager, "allreduce in a tf.function": in_function,
                  "tracing apply": traced}.items():
    found = fewest(way)
    if hvd.rank() == 0:
        modules = {call.partition(":")[0] for call in found}
        print(f"{name}: {len(found)} calls in {len(modules)} modules", flush=True)
        if "--list" in sys.argv:
            print("\n".join(f"    {call}" for call in found), flush=True)
