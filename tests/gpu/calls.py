"""How often a training step calls CUDA to wait, to allocate and to free, counted by NVIDIA's profiler nsys.

    python -m tests.gpu.calls [arrays] [tensorflow] [tensorflow-alone]

Each kind of step runs in a process of its own under `nsys profile`, which records only the steps between
cudaProfilerStart and cudaProfilerStop. The first steps, which connect and compile, come before. `tensorflow-alone`
is TensorFlow's step without the averaging, for TensorFlow calls CUDA too.
"""

import csv
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat

STEPS = 50
TENSORS = 161  # as many as ResNet-50 has
# CUDA's calls by a part of their names, in lower case.
CALLS = {"waits": "synchronize", "allocations": "alloc", "frees": "free"}


def counts_per_step(report: str) -> dict[str, float]:
    """The calls per step, from the CSV of `nsys stats -r cuda_api_sum`, which may follow other lines.

    Raises:
        ValueError: The report lists no calls.
    """
    lines = report.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("Time (%)")), len(lines))
    number: Counter[str] = Counter()
    rows = list(csv.DictReader(lines[start:]))
    for row in rows:
        for kind, part in CALLS.items():
            if part in (row["Name"] or "").lower():
                number[kind] += int(row["Num Calls"])
    if not rows:
        raise ValueError(f"the profiler has recorded no calls of CUDA: {report}")
    return {kind: number[kind] / STEPS for kind in CALLS}


def profiled(kind: str) -> dict[str, float]:
    """Run the steps of a kind under the profiler, and return the calls per step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.nsys-rep"
        subprocess.run(["nsys", "profile", "-t", "cuda", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
                        "-o", str(path), sys.executable, "-m", "tests.gpu.calls", "--steps-of", kind], check=True)
        made = subprocess.run(["nsys", "stats", "-r", "cuda_api_sum", "--format", "csv", str(path)], check=True,
                              stdout=subprocess.PIPE, text=True)
    return counts_per_step(made.stdout)


def main(kinds: Iterable[str]) -> None:
    """Print the counts. Raise AssertionError if a step of arrays waits, allocates or frees."""
    for kind in kinds:
        found = profiled(kind)
        print(f"calls of CUDA per step, {kind}: " + ", ".join(f"{count:.2f} {name}" for name, count in found.items()),
              flush=True)
        assert kind != "arrays" or not any(found.values()), "a step of arrays must not wait, allocate or free"


# -- the steps, in the process that is profiled -----------------------------------------------------------------------


def steps_of(kind: str, recording: AbstractContextManager[Any]) -> None:
    """Run the steps of a kind, the first ones outside of `recording`."""
    mpistrat.init()
    step = arrays() if kind == "arrays" else tensorflow(averages=kind == "tensorflow")
    for _ in range(5):
        step()
    with recording:
        for _ in range(STEPS):
            step()
    mpistrat.shutdown()


def arrays() -> Callable[[], object]:
    """A step that averages cupy arrays."""
    if "--stand-in" in sys.argv:
        from mpistrat.api import libraries, own_gpu
        from tests.support.gpu_stand_in import Device
        stand_in: Any = Device()
        own_gpu.make_device = lambda number: stand_in
        libraries.KINDS["tests"] = libraries.Cupy()
        made = [stand_in.tensor(np.ones(100, np.float32)) for _ in range(TENSORS)]
    else:
        import cupy
        made = [cupy.ones(100, np.float32) for _ in range(TENSORS)]
    return lambda: mpistrat.grouped_allreduce(made, name="step")


def tensorflow(averages: bool) -> Callable[[], object]:
    """A step of TensorFlow's: matrix products, whose gradients are averaged or not."""
    import tensorflow as tf

    import mpistrat.tensorflow as hvd
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


class Recording:
    """What the profiler records."""

    def __enter__(self) -> None:
        import cupy
        cupy.cuda.runtime.deviceSynchronize()
        cupy.cuda.runtime.profilerStart()

    def __exit__(self, *_: object) -> None:
        import cupy
        cupy.cuda.runtime.profilerStop()


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if "--stand-in" in sys.argv:
        steps_of("arrays", nullcontext())
    elif "--steps-of" in sys.argv:
        steps_of(names[0], Recording())
    else:
        main(names or ["arrays"])
