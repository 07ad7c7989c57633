"""Run a Python program with other values of tuning constants, to measure what they gain.

    mpirun -np 2 python -m tests.tuned SHM_CHUNK_BYTES=2**20 -m mpistrat bench 16MB
    mpirun -np 2 python -m tests.tuned BUCKET_BYTES=4*2**20 train.py
"""

import ast
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

NAME = "mpistrat.core.tuning"
PATH = Path(__file__).parents[1] / "mpistrat/core/tuning.py"


def replace(assignments: Sequence[str]) -> ModuleType:
    """Load mpistrat.core.tuning with other values, each NAME=VALUE, before any module takes a value from it.

    Raises:
        ValueError: There is no such constant.
    """
    assert NAME not in sys.modules, f"{NAME} has been imported already"
    spec = importlib.util.spec_from_file_location(NAME, PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in (assignment.split("=", 1) for assignment in assignments):
        if not name.isupper() or not hasattr(module, name):
            raise ValueError(f"{PATH} has no constant {name}")
        setattr(module, name, eval(compile(ast.parse(value, mode="eval"), value, "eval"), {"__builtins__": {}}))
    sys.modules[NAME] = module
    return module


def main() -> None:
    """Replace the constants, and run the program that follows them in the command line."""
    words = sys.argv[1:]
    count = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    if count == len(words):
        sys.exit(__doc__)
    replace(words[:count])
    program = words[count:]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    main()
