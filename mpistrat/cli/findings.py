"""Lines of JSON from a process to the command that started it. A mark tells them from what MPI prints to stdout.

Called by `mpistrat doctor`, and by the processes that doctor starts.
"""

import json
from collections.abc import Iterator
from typing import Any

MARK = "mpistrat-doctor "  # begins a line with findings


def say(kind: str, **values: object) -> None:
    """Print a finding as one line. A line of less than 4096 bytes is not mixed with lines of other processes."""
    print(MARK + json.dumps({"kind": kind, **values}), flush=True)


def understood(text: str) -> Iterator[dict[str, Any]]:
    """Yield the findings in the output of processes. Truncated lines are skipped."""
    for line in text.splitlines():
        _, mark, said = line.partition(MARK)
        try:
            found = json.loads(said) if mark else None
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
