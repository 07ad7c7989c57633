"""What a process prints for the command that has started it, as lines of JSON: MPI libraries print to stdout too.

Called by the processes of `mpistrat doctor`, and by that command.
"""

import json
from collections.abc import Iterator
from typing import Any

MARK = "mpistrat-doctor "  # begins a line with findings


def say(kind: str, **values: object) -> None:
    """Print a line. One of less than 4096 bytes stays whole among those of other processes."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def understood(text: str) -> Iterator[dict[str, Any]]:
    """What processes have said. A line that was cut is left out; its process has then not said it."""
    for line in text.splitlines():
        _, mark, said = line.partition(MARK)
        try:
            found = json.loads(said) if mark else None
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
