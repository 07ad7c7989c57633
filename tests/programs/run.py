"""Run scripts as a user would, one after the other on every rank, so that only the first takes the time of a start.

    mpirun -np 2 python tests/programs/run.py DIRECTORY "[NAME=VALUE ...] SCRIPT [ARGUMENT ...]" ...

SCRIPT is a path from here, or from DIRECTORY. They run in DIRECTORY, which all ranks share; "{rank}" in a line is the
rank, and an argument with a slash at its end is a directory that is made. With COMPILED=all XLA compiles the script's
models and functions though it does not say so; with any value the script is skipped where XLA cannot. After each, every
rank says as JSON how it has ended and what it has printed (tests/support/scripts.py has the fields), and compares with
the other ranks what the script's global names hold: models, optimizers, variables.
"""

import contextlib
import hashlib
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import mpistrat
from mpistrat.tensorflow.xla import ffi
from tests.scripts.reporting import launched_rank, say
from tests.support.compiled import compiled_by_xla


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


def compare(names: Mapping[str, object]) -> str:
    """Which of the names hold variables, how many, and whether these are finite and have the same bits on all ranks."""
    own, is_finite = {}, True
    for name, value in names.items():
        arrays = [np.asarray(tf.convert_to_tensor(variable)) for variable in variables_of(value)]
        if arrays:
            own[name] = len(arrays), hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
            is_finite &= all(np.isfinite(array).all() for array in arrays if array.dtype.kind == "f")
    everybody = mpistrat.allgather_object(own) if mpistrat.is_initialized() else [own]
    shared = [name for name in own if all(name in other for other in everybody)]  # A chief may load one more.
    unequal = [name for name in shared if any(other[name] != own[name] for other in everybody)]
    outcome = f"unequal: {unequal}" if unequal else "equal" if is_finite else "not finite"
    return f"{', '.join(f'{name} {own[name][0]}' for name in shared)}: {outcome}"


@contextlib.contextmanager
def printed_to(file: int) -> Iterator[None]:
    """Whatever writes to stdout, the descriptor included, writes to the file."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(file, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(own, 1)
        os.close(own)


def run(line: str, root: Path) -> None:
    """Run a script, and say how it has ended. An error on one rank only, other than an exit, ends the job."""
    words, before = shlex.split(line.replace("{rank}", str(launched_rank()))), dict(os.environ)
    while re.match("[A-Z_]+=", words[0]):
        name, _, os.environ[name] = words.pop(0).partition("=")
    began = time.monotonic()
    path = root / words[0] if (root / words[0]).exists() else Path(words[0]).absolute()
    sys.argv = [str(path), *words[1:]]
    for directory in words[1:]:
        if directory.endswith("/"):
            os.makedirs(directory, exist_ok=True)
    sys.path.insert(0, str(path.parent))
    error, names = "", {}
    with tempfile.TemporaryFile("w+") as printed:
        try:
            if "COMPILED" in os.environ and ffi.api() is None:
                sys.exit("skipped: this TensorFlow does not export XLA's FFI")
            compiled = compiled_by_xla() if os.environ.get("COMPILED") == "all" else contextlib.nullcontext()
            with printed_to(printed.fileno()), compiled:
                names = runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ending:
            error = "" if ending.code in (None, 0) else str(ending.code)
        except Exception:
            traceback.print_exc()
            raise
        printed.seek(0)
        output = printed.read()
    equal = compare(names)
    for name in {*os.environ} - {*before}:
        del os.environ[name]
    sys.path.remove(str(path.parent))
    mpistrat.shutdown()
    keras.utils.clear_session()
    keras.mixed_precision.set_global_policy("float32")
    tf.random.set_seed(None)  # A new process has none; a shuffle takes it with its own.
    say(json.dumps({"line": line, "error": error, "output": output, "equal": equal,
                    "directory": os.getcwd(), "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    for kind, variable in (("inter", "TF_NUM_INTEROP_THREADS"), ("intra", "TF_NUM_INTRAOP_THREADS")):
        # A script may set what is set already, though the threads have been made.
        if variable in os.environ:
            getattr(tf.config.threading, f"set_{kind}_op_parallelism_threads")(int(os.environ[variable]))
    directory, *lines = sys.argv[1:]
    here = Path.cwd()
    os.chdir(directory)
    for each in lines:
        run(each, here)
