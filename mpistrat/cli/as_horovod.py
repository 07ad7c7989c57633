"""`mpistrat run --as-horovod` and `mpistrat as-horovod`: let an unedited program that imports horovod use mpistrat.

The option puts a directory on the PYTHONPATH of the ranks. The directory has a package `horovod` with the functions of
mpistrat (mpistrat/horovod), metadata of that package for importlib.metadata, and a directory `bin` with a command
`horovodrun`. The subcommand prints shell lines that also put `bin` on the PATH. Called by main.py and `mpistrat run`.
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
_WORDS_HELP = "=keras2 also makes Keras 3 accept three names of Keras 2: optimizer.variables(), lr=, " \
    "compile(experimental_run_tf_function=)"
_EPILOG = """\
For mpirun and srun, where `mpistrat run --as-horovod` does not start the ranks:

  eval "$(mpistrat as-horovod --env)"
  srun -n 4 dp --tf train input.json

The lines put a package `horovod` with the names of mpistrat first on PYTHONPATH, and a command `horovodrun`, which runs
`mpistrat run --as-horovod`, first on PATH. Both variables are set until the shell ends.
"""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --as-horovod to the parser of `mpistrat run`."""
    parser.add_argument("--as-horovod", nargs="?", const=False, choices=("keras2",),
                        help=f"for a program that you cannot edit: its `import horovod` finds mpistrat; {_WORDS_HELP}")


def variables(words: str | bool | None, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that --as-horovod sets for the ranks; {} if `words` is None.

    HOROVOD_ variables in `environ` are added as MPISTRAT_ variables. `words`: The value of the option; None without it,
    False without a value.
    """
    if words is None:
        return {}
    path = environ.get("PYTHONPATH", "")
    if _HERE not in path.split(os.pathsep):
        path = f"{_HERE}{os.pathsep}{path}".rstrip(os.pathsep)
    return {"PYTHONPATH": path, **({RUN_KERAS_2: "1"} if words else {}), **taken_from_horovod(environ)}


def first_line() -> str:
    """Return a sentence for the user: `import horovod` finds mpistrat, even if Horovod is installed."""
    other = next(iter(importlib.metadata.distributions(name="horovod", path=[
        place for place in sys.path if place != _HERE])), None)
    beside = f" Horovod {other.version} is installed too, in {other.locate_file('')}, and is not used." if other else ""
    return f"`import horovod` finds mpistrat {__version__}.{beside}"


def main(argv: list[str]) -> int:
    """Run `mpistrat as-horovod` and return 0. Raises LaunchError for wrong input."""
    parser = Parser("as-horovod", "Print the shell lines after which `import horovod` finds mpistrat.", _EPILOG)
    parser.add_argument("--env", nargs="?", const=False, choices=("keras2",),
                        help=f"print the lines for a shell; {_WORDS_HELP}")
    words = parser.parse_args(argv).env
    if words is None:
        raise LaunchError('--env is missing. Type: eval "$(mpistrat as-horovod --env)"')
    found = variables(words, os.environ)
    print(f'export PATH={shlex.quote(os.path.join(_HERE, "bin"))}:"$PATH"')
    for name, value in found.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"mpistrat as-horovod: {first_line()}", file=sys.stderr)
    return 0
