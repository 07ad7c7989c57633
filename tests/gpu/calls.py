"""Counts, by CUPTI, how often a training step calls CUDA to wait, to allocate memory and to free memory.

    python -m tests.gpu.calls [arrays] [tensorflow] [tensorflow-alone]

Each kind of step runs in a separate process. The first steps are not counted, because they connect and compile.
`tensorflow-alone` averages nothing: it shows which calls TensorFlow itself makes.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import mpistrat

from .cupti import Calls

STEPS = 50
TENSORS = 161  # as many as ResNet-50 has
# The driver's calls by a part of their names, in lower case.
CALLS = {"waits": "synchronize", "allocations": "alloc", "frees": "free"}


def counts_per_step(number: Mapping[str, int]) -> dict[str, float]:
    """Return the calls per step of each kind in CALLS. `number`: All calls, by name. ValueError if it is empty."""
    if not number:
        raise ValueError("CUPTI has counted no calls of CUDA")
    return {kind: sum(count for name, count in number.items() if part in name.lower()) / STEPS
            for kind, part in CALLS.items()}


def main(kinds: Iterable[str]) -> int:
    """Run the steps of each kind in a separate process. Return 1 if one of the processes has failed."""
    codes = [subprocess.run([sys.executable, "-m", "tests.gpu.calls", "--steps-of", kind], check=False).returncode
             for kind in kinds]
    return int(any(codes))


# -- the steps, in the process that is profiled -----------------------------------------------------------------------


def steps_of(kind: str) -> None:
    """Run steps of this kind, and print the counts. AssertionError if a step of arrays waits, allocates or frees."""
    if kind == "arrays":
        mpistrat.init()
        step = arrays()
    else:
        step = tensorflow(averages=kind == "tensorflow")
    for _ in range(5):
        step()
    with Calls() as calls:
        for _ in range(STEPS):
            step()
    mpistrat.shutdown()
    found = counts_per_step(calls.number)
    print(f"calls of CUDA per step, {kind}: " + ", ".join(f"{count:.2f} {name}" for name, count in found.items()),
          flush=True)
    assert kind != "arrays" or not any(found.values()), "a step of arrays must not wait, allocate or free"


def arrays() -> Callable[[], object]:
    if "--stand-in" in sys.argv:
        from mpistrat.api import tensors as gpu_tensors
        from mpistrat.api.tensors import KINDS, Cupy
        from tests.support.gpu_stand_in import Device
        stand_in: Any = Device()
        gpu_tensors.make_device = lambda number: stand_in
        KINDS["tests"] = Cupy()
        made = [stand_in.tensor(np.ones(100, np.float32)) for _ in range(TENSORS)]
    else:
        import cupy
        made = [cupy.ones(100, np.float32) for _ in range(TENSORS)]
    return lambda: mpistrat.grouped_allreduce(made, name="step")


def tensorflow(averages: bool) -> Callable[[], object]:
    """Return a training step of TensorFlow: matrix products as gradients. `averages`: Whether it averages them."""
    import tensorflow as tf

    import mpistrat.tensorflow as hvd
    hvd.init()
    variables = [tf.Variable(tf.ones([100, 100])) for _ in range(TENSORS)]

    @tf.function
    def step() -> tf.Tensor:
        gradients = [tf.matmul(variable, variable) for variable in variables]
        if averages:
            gradients = hvd.grouped_allreduce(gradients)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign(gradient / 100)
        return tf.reduce_sum(variables[-1])

    return lambda: step().numpy()


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if "--stand-in" in sys.argv:
        mpistrat.init()
        arrays()()
    elif "--steps-of" in sys.argv:
        steps_of(names[0])
    else:
        sys.exit(main(names or ["arrays"]))
