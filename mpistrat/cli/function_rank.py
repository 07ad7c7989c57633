"""One rank of mpistrat.run: `python -m mpistrat.cli.function_rank DIRECTORY`. See function.py.

DIRECTORY has the pickled function. The lowest rank that sees DIRECTORY reads the function and broadcasts it. Ranks on
hosts without DIRECTORY send their results to that rank. Started by function.py, under mpirun.
"""

import os
import pickle
import platform
import sys
import traceback
from pathlib import Path

from ..api import array_ops, runtime
from ..api.array_ops import dumps
from ..core.errors import CollectiveError, LaunchError, MpistratError
from ..core.ownership import foreign
from .function import CALL, RANK_FILE, STARTED, RankResult, write


def main(directory: Path) -> None:
    """Call the function on this rank. Collective. Raises LaunchError on all ranks if no rank sees the directory."""
    runtime.init()
    rank = runtime.current().topology.rank
    sees = is_seen(directory)
    everybody: list[bool] = array_ops.allgather_object(sees, "run.sees")
    if not any(everybody):
        raise LaunchError(f"run(): no rank sees the directory {directory} of the host that called run(). Put a rank "
                          "on that host, or set TMPDIR to a directory that all hosts share.")
    reader = everybody.index(True)
    written = (directory / CALL).read_bytes() if rank == reader else b""
    path, call = pickle.loads(array_ops.broadcast_object(written, reader, "run.call"))
    sys.path += [entry for entry in path if entry not in sys.path]
    if rank == reader:
        write(directory / STARTED, b"")
    outcome = _outcome(call, (directory / RANK_FILE.format(rank)) if sees else None)
    if not all(everybody):
        runtime.init()  # The function may have called shutdown().
        for other, found in enumerate(array_ops.allgather_object(None if sees else outcome, "run.results")):
            if found is not None and rank == reader:
                write(directory / RANK_FILE.format(other), pickle.dumps(found))


def is_seen(directory: Path) -> bool:
    """Return whether this host has the directory of the job. A directory of a different user does not count."""
    try:
        return not foreign(directory.lstat(), os.geteuid(), 0o077) and (directory / CALL).exists()
    except OSError:
        return False


def _outcome(call: bytes, path: Path | None) -> RankResult:
    """Call the pickled function. Return its result or raise its exception, and write either to `path` (if any)."""
    try:
        function, args, kwargs = pickle.loads(call)
        result = function(*args, **kwargs)
        try:
            outcome = RankResult(dumps(result), host=platform.node())
        except Exception as error:
            raise TypeError(f"the result of the function cannot be pickled: {error}. Return plain values, or numpy "
                            f"arrays. Received: {type(result)}") from error
    except BaseException as error:
        if path is not None:
            write(path, pickle.dumps(_failure(error)))
        if isinstance(error, SystemExit):  # SystemExit would end Python silently, and the other ranks would wait.
            raise RuntimeError(f"the function that was given to run() has called sys.exit({error.code!r})") from error
        raise
    if path is not None:
        write(path, pickle.dumps(outcome))
    return outcome


def _failure(error: BaseException) -> RankResult:
    try:
        exception = dumps(error)
    except Exception:
        exception = None  # The traceback names the exception.
    text = "".join(traceback.format_exception(error))
    # TensorFlow puts an error that was raised in a graph into the text of its own exception.
    is_consequence = isinstance(error, CollectiveError) or (
        not isinstance(error, MpistratError) and CollectiveError.__module__ in text)
    return RankResult(error=text, exception=exception, is_consequence=is_consequence, host=platform.node())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
