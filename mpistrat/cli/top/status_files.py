"""Read the status files of this user's jobs. Rank 0 of each job writes its file once a second, on its own host.

The directory belongs to the user alone (mode 0700). A file of another user or version, or a truncated file, is not
shown. The result has the reason. Called by top_command.py.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.ownership import foreign
from ...process import procfs
from ...trace.reports import VERSION

# A rank or a job that has not reported for this time is called silent.
SILENT_S = 10.0


@dataclass(frozen=True)
class Outstanding:
    """An operation that a rank submitted `since_s` seconds ago, and that is not complete."""

    name: str
    since_s: float


@dataclass(frozen=True)
class RankStatus:
    """The last report of a rank."""

    # rank, host, pid: The rank, its host, and its process ID.
    rank: int
    host: str
    pid: int
    # steps, rows: Numbers since the start; None if nothing counts them.
    steps: int | None
    rows: int | None
    # operations, bytes: Number of collectives since the start, and the bytes that they have reduced or sent.
    operations: int
    bytes: int
    # computing, waiting, moving, hidden: Shares of the last interval in which the rank had no collective in flight,
    # waited for other ranks, waited for the bytes, and waited for ranks or bytes during the backward pass.
    computing: float
    waiting: float
    moving: float
    hidden: float
    # cores, delayed: In the last interval, the number of cores that the rank's threads used, and the seconds per second
    # in which threads were ready to run but had no core.
    cores: float
    delayed: float
    place: str  # The place of the main thread in the script; "" if not known.
    rss_bytes: int  # The memory of the process.
    outstanding: tuple[Outstanding, ...]  # The operations that the rank waits for.
    written: float  # The time of the report, in seconds since 1970.


@dataclass(frozen=True)
class JobStatus:
    """The content of the status file of a job. Times are in seconds since 1970."""

    job: str
    started: float
    written: float
    size: int
    script: str
    ranks: tuple[RankStatus, ...]


@dataclass(frozen=True)
class Found:
    """The jobs of a directory, and a sentence for each file that cannot be shown."""

    jobs: tuple[JobStatus, ...]
    problems: tuple[str, ...] = ()


def read(directory: Path, uid: int, time_s: float) -> Found:
    """Return the jobs of the user with this ID, in order of start. `time_s`: the time now, in seconds since 1970."""
    try:
        if (problem := foreign(directory.lstat(), uid, 0o077)):
            return Found((), (f"{directory} {problem}: its files are not read",))
        paths = sorted(directory.glob("*.json"))
    except FileNotFoundError:
        return Found(())
    jobs, problems = [], []
    for path in paths:
        try:
            job = _read_file(path, uid)
            silent_s, first = time_s - job.written, job.ranks[0].pid if job.ranks else None
            if silent_s >= SILENT_S and (first is None or procfs.find(first) is None):
                # A job that is killed leaves its file behind.
                raise ValueError(f"was written {silent_s:.0f} s ago, and the first rank (process {first}) has ended. "
                                 "Remove the file")
            jobs.append(job)
        except FileNotFoundError:
            continue  # The job has just ended.
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    return Found(tuple(sorted(jobs, key=lambda job: job.started)), tuple(problems))


def _read_file(path: Path, uid: int) -> JobStatus:
    """Read one status file. Raises ValueError with the problem, or OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
        if (problem := foreign(os.fstat(file.fileno()), uid, 0o022)):
            raise ValueError(problem)
        text = file.read()
    try:
        content = json.loads(text)
    except ValueError:
        raise ValueError("is truncated, or is not JSON") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise ValueError(f"has version {version}, but this mpistrat reads version {VERSION}. Remove the file if "
                         "its job has ended")
    try:
        return parse(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is incomplete: {error}. Another version of mpistrat has written the file. Remove it if "
                         "its job has ended") from None


def parse(content: Mapping[str, Any]) -> JobStatus:
    """Parse the content of a status file. Unknown fields are ignored. Raises KeyError or TypeError."""
    ranks = []
    for each in content["ranks"]:
        outstanding = tuple(Outstanding(str(one["name"]), float(one["since_s"])) for one in each["outstanding"])
        values = {one.name: each[one.name] for one in fields(RankStatus)}
        ranks.append(RankStatus(**{**values, "outstanding": outstanding}))
    return JobStatus(str(content["job"]), float(content["started"]), float(content["written"]), int(content["size"]),
                     str(content["script"]), tuple(sorted(ranks, key=lambda rank: rank.rank)))
