"""Words in the output of the commands. Called by the modules of `mpistrat check` and `mpistrat bench`."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 host", "2 hosts"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
