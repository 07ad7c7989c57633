"""`mpistrat run --as-horovod`, and `mpistrat as-horovod`: a program that imports horovod, unedited, gets mpistrat.

The ranks get a directory on PYTHONPATH with a package `horovod`, whose names are mpistrat's (horovod/imports.py), and
with the metadata by which importlib.metadata knows its version. Without the flag none of that is on a path. It contains
a directory with a command `horovodrun`, for a user's PATH. Called by main.py and `mpistrat run`.
"""

import argparse
import importlib.metadata
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from ..core.errors import LaunchError
from ..core.settings import taken_from_horovod
from ..core.version import __version__
from ..process.launch_env import RUN_KERAS_2
from .arguments import Parser

_HERE = str(Path(__file__).parents[1] / "horovod" / "path")
_WORDS = ("", "keras2")
_WORDS_HELP = "with =keras2 also three words of Keras 2 in Keras 3: optimizer.variables(), lr=, " \
    "compile(experimental_run_tf_function=)"
_EPILOG = """\
For mpirun and srun, where `mpistrat run --as-horovod` does not start the ranks:

  eval "$(mpistrat as-horovod --env)"
  srun -n 4 dp --tf train input.json

It puts a package `horovod` with the names of mpistrat first on PYTHONPATH, and a command `horovodrun`, which is
`mpistrat run --as-horovod`, first on PATH. Both last as long as the shell.
"""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --as-horovod to the parser of `mpistrat run`."""
    parser.add_argument("--as-horovod", nargs="?", const="", choices=_WORDS, metavar="keras2",
                        help=f"for a program that you cannot edit: its `import horovod` finds mpistrat; {_WORDS_HELP}")


def variables(words: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of --as-horovod for the ranks; `words` is its value, None without it.

    They include the settings that HOROVOD_ variables of `environ` stand for.
    """
    if words is None:
        return {}
    path = environ.get("PYTHONPATH", "")
    if _HERE not in path.split(os.pathsep):
        path = f"{_HERE}{os.pathsep}{path}".rstrip(os.pathsep)
    return {"PYTHONPATH": path, **({RUN_KERAS_2: "1"} if words else {}), **taken_from_horovod(environ)}


def first_line() -> str:
    """The sentence that says whose names the program gets."""
    other = next(iter(importlib.metadata.distributions(name="horovod", path=[
        place for place in sys.path if place != _HERE])), None)
    beside = f" Horovod {other.version} is installed too, in {other.locate_file('')}, and is not used." if other else ""
    return f"`import horovod` finds mpistrat {__version__}.{beside}"


def main(argv: list[str]) -> int:
    """Run `mpistrat as-horovod` and return 0. Raises LaunchError for wrong input."""
    parser = Parser("as-horovod", "Print the lines by which programs of a shell find mpistrat for `import horovod`.",
                    _EPILOG)
    parser.add_argument("--env", nargs="?", const="", choices=_WORDS, metavar="keras2",
                        help=f"print the lines for a shell; {_WORDS_HELP}")
    words = parser.parse_args(argv).env
    if words is None:
        raise LaunchError('say --env, for example: eval "$(mpistrat as-horovod --env)"')
    found = variables(words, os.environ)
    print(f'export PATH={shlex.quote(os.path.join(_HERE, "bin"))}:"$PATH"')
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"mpistrat as-horovod: {first_line()}", file=sys.stderr)
    return 0
