"""`mpistrat bench --train`: training on synthetic data with and without averaging, in turn on the same ranks, and then
in one process that has the cores of all ranks of the first host.

Called by command.py, on every rank. As a program, which that starts, this is the one process.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import mpistrat
from mpistrat.api import runtime
from mpistrat.process import cores

if TYPE_CHECKING:
    import keras

_WARM_UP = 2
_POLL_S = 0.2


def models(image: int) -> dict[str, Callable[[], Any]]:
    """Return functions that make the Keras models, by name: ResNet-50 for `image` x `image` pixels, and an MLP."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    layers = keras.layers

    def mlp() -> Any:
        return keras.Sequential([keras.Input((784,)), layers.Dense(1024, "relu"), layers.Dense(1024, "relu"),
                                 layers.Dense(10)])

    return {"resnet50": lambda: keras.applications.ResNet50(weights=None, input_shape=(image, image, 3), classes=10,
                                                                classifier_activation=None),
            "mlp": mlp}


def measure_training(name: str, image: int, batch: int, steps: int,
                     say: Callable[[str], None]) -> tuple[float, float]:
    """Return the median seconds per step of one model, (without, with) averaging over the ranks. Collective.

    All ranks train in both cases, in alternate steps, so that they share cores, memory and power in the same way. The
    difference is the cost of averaging. In both cases the ranks start each step at the same time. `say` gets a sentence
    on how long it will take.
    """
    import mpistrat.keras as hvd
    compiled = [_compiled(name, image, around) for around in (lambda optimizer: optimizer, hvd.DistributedOptimizer)]
    data = _batch(compiled[0], batch, mpistrat.rank())
    seconds: list[list[float]] = [[], []]
    for step in range(_WARM_UP + steps):
        if step == _WARM_UP:  # As many steps in one process, with the rows of all ranks, take up to as long again.
            left_s = steps * (seconds[0][-1] + seconds[1][-1])
            say(f"{name}: {2 * steps} steps on the ranks, about {left_s:.0f} s; then {_WARM_UP + steps} in one process")
        for model, times in zip(compiled, seconds, strict=True):
            mpistrat.barrier()
            times.append(_seconds_of_step(model, data))
    slowest = mpistrat.allreduce(np.array(seconds)[:, _WARM_UP:], name="bench.train", op=mpistrat.Max)
    return statistics.median(slowest[0].tolist()), statistics.median(slowest[1].tolist())


def measure_one_process(name: str, image: int, batch: int, steps: int) -> tuple[float, int, int]:
    """Return the samples per second of one process without mpistrat, its batch and the number of its CPUs. Collective.

    It has the CPUs of all ranks of rank 0's host, which wait meanwhile, and trains on their samples in one batch.

    Args:
        name, image, steps: As in measure_training.
        batch: That of one rank.

    Raises:
        RuntimeError: On every rank, when the process fails.
    """
    host_of = runtime.current().topology.host_of
    found = mpistrat.allgather_object(cores.own_cpus(), name="bench.cpus")
    local = [cpus for cpus, host in zip(found, host_of, strict=True) if host == host_of[0]]
    cpus, batch = sorted(frozenset().union(*local)), batch * len(local)
    child = None
    if mpistrat.rank() == 0:
        child = subprocess.Popen([sys.executable, "-m", __name__, json.dumps([name, image, batch, steps, cpus])],
                                 stdout=subprocess.PIPE, text=True)
    while True:  # A wait of minutes for one collective would be reported as a stall.
        code = mpistrat.broadcast_object(child and child.poll(), name="bench.code")
        if code is not None:
            break
        time.sleep(_POLL_S)
    if code:
        raise RuntimeError(f"the process that trains {name} alone has ended with exit code {code}")
    printed = child.communicate()[0] if child is not None else ""
    seconds = float(mpistrat.broadcast_object(printed, name="bench.alone"))
    return batch / seconds, batch, len(cpus)


def _compiled(name: str, image: int, around: Callable[[Any], Any]) -> Any:
    """A model, compiled with what `around` makes of its optimizer."""
    make = models(image)[name]
    import keras
    keras.utils.set_random_seed(1)
    model = make()
    model.compile(around(keras.optimizers.SGD(0.001, momentum=0.9)),
                  loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def _batch(model: "keras.Model", rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.random((rows, *model.input_shape[1:]), np.float32), random.integers(0, 10, rows)


def _seconds_of_step(model: "keras.Model", data: tuple[np.ndarray, np.ndarray]) -> float:
    began = time.perf_counter()
    model.train_on_batch(*data)
    return time.perf_counter() - began


def _train_alone(name: str, image: int, batch: int, steps: int, cpus: Sequence[int]) -> float:
    """Return the median seconds per step in this process, on these CPUs."""
    if cpus:
        cores.take(cpus)  # Before TensorFlow counts its threads by them.
    model = _compiled(name, image, lambda optimizer: optimizer)
    data = _batch(model, batch, 0)
    return statistics.median([_seconds_of_step(model, data) for _ in range(_WARM_UP + steps)][_WARM_UP:])


if __name__ == "__main__":
    print(_train_alone(*json.loads(sys.argv[1])))
