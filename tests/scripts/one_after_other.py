"""Run scripts as a user would, one after the other on every rank, and compare the ranks' weights after each.

    mpirun -np 2 python tests/scripts/one_after_other.py DIRECTORY "SCRIPT [ARGUMENT ...]" ...

They run in DIRECTORY, which all ranks share. After each, every rank says which of the script's global names hold models
and optimizers, how many variables these have, and whether all ranks have the same bits; ranks other than the first also
say what the script has printed there.
"""

import contextlib
import hashlib
import io
import os
import runpy
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from reporting import launched_rank, say

import mpistrat


def variables_of(value: object) -> Iterator[object]:
    """The variables of the models and optimizers in a value; random states are each rank's own."""
    if isinstance(value, Mapping):
        for element in value.values():
            yield from variables_of(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from variables_of(element)
    elif isinstance(value, keras.Model):
        yield from value.weights
        for attribute in vars(value).values():
            yield from variables_of(attribute) if isinstance(attribute, keras.optimizers.Optimizer) else ()
    elif isinstance(value, keras.optimizers.Optimizer):
        yield from value.variables
    elif isinstance(value, tf.Variable):
        yield value


def run(line: str, root: Path) -> None:
    """Run a script, and say which of its names hold variables, and whether these are finite and equal on all ranks."""
    script, *arguments = shlex.split(line)
    began = time.monotonic()
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed) if launched_rank() else contextlib.nullcontext():
        names = runpy.run_path(str(root / script), run_name="__main__")
    own, is_finite = {}, True
    for name, value in names.items():
        arrays = [np.asarray(tf.convert_to_tensor(variable)) for variable in variables_of(value)]
        if arrays:
            own[name] = len(arrays), hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
            is_finite &= all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")
    everybody = mpistrat.allgather_object(own)
    shared = [name for name in own if all(name in other for other in everybody)]  # A chief may load one more.
    unequal = [name for name in shared if any(other[name] != own[name] for other in everybody)]
    outcome = f"unequal: {unequal}" if unequal else "equal" if is_finite else "not finite"
    say(f"{Path(script).stem}: {', '.join(f'{name} {own[name][0]}' for name in shared)}: {outcome}")
    if printed.getvalue():
        say(f"{Path(script).stem} has printed: {printed.getvalue()}")
    if launched_rank() == 0:
        print(f"{Path(script).stem}: {time.monotonic() - began:.1f} s", flush=True)
    mpistrat.shutdown()
    keras.utils.clear_session()
    keras.mixed_precision.set_global_policy("float32")


if __name__ == "__main__":
    directory, *lines = sys.argv[1:]
    here = Path.cwd()
    os.chdir(directory)
    for each in lines:
        run(each, here)
