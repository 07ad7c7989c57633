"""`mpistrat timeline FILE`: where the time of each rank went, which rank came last, what was not fused and why.

Called by main.py.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ...core.errors import LaunchError
from ...trace.analysis import analyse
from ...trace.timeline import places_in, records_in
from ..arguments import Parser
from ..main import EXIT_WRONG_INPUT
from .page import page
from .text import text_of

_EPILOG = """\
The exit code is 0 if the file is complete; 2 if its end is missing (the job was killed), or if it is not a timeline.

examples:
  MPISTRAT_TIMELINE=steps.json MPISTRAT_TIMELINE_STEPS=100:120 mpistrat run -np 2 python train.py
  mpistrat timeline steps.json
  mpistrat timeline steps.json --html steps.html
  mpistrat run -np 2 -- mpistrat bench 16MB --json bench.json && mpistrat timeline steps.json --bench bench.json
"""


def main(argv: list[str]) -> int:
    """Run the subcommand and return the exit code.

    Raises LaunchError: The file cannot be read, or is not a timeline; or the page cannot be written.
    """
    options = _parser().parse_args(argv)
    try:
        records, is_cut = records_in(options.file)
    except (OSError, ValueError) as error:
        raise LaunchError(f"{options.file} cannot be read as a timeline: {error}") from error
    analysis = analyse(records)
    print(text_of(analysis, options.file, _measured(options.bench) if options.bench else ()))
    if options.html:
        try:
            made = page(analysis, records, places_in(options.file), Path(options.file).name)
            Path(options.html).write_text(made, encoding="utf-8")
        except OSError as error:
            raise LaunchError(f"the page cannot be written: {error}") from error
    if is_cut:
        print(f"mpistrat timeline: the end of {options.file} is missing: the job was killed, or it still runs.",
              file=sys.stderr)
        return EXIT_WRONG_INPUT
    return 0


def _measured(path: str) -> list[dict[str, Any]]:
    """Return the points in a file that `mpistrat bench --json` has written."""
    try:
        points = json.loads(Path(path).read_bytes())
        return [{key: point[key] for key in ("case", "operation", "nbytes", "mpistrat_s")} for point in points]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"--bench {path} is not a file of mpistrat bench --json: {error!r}") from error


def _parser() -> Parser:
    parser = Parser("timeline", "Summarise a timeline, the file of MPISTRAT_TIMELINE or of start_timeline().",
                    _EPILOG)
    parser.add_argument("file", metavar="FILE", help="a timeline")
    parser.add_argument("--bench", metavar="FILE", help="compare with the file of `mpistrat bench --json FILE`")
    parser.add_argument("--html", metavar="OUT", help="write a page with charts to OUT; the page needs no network")
    return parser
