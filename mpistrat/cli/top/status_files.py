"""Read the status files of the jobs of this user, which the first rank of each writes once a second on its host.

The directory belongs to the user alone (mode 0700). A file that is not the user's, is cut, or is of another version is
not shown; why is part of the result. Called by command.py.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.ownership import foreign
from ...process import procfs
from ...trace.status import VERSION

# A rank, or a job, of which nothing was heard for so long is called silent.
SILENT_S = 10.0


@dataclass(frozen=True)
class Outstanding:
    """An operation that a rank has submitted, and `since_s` seconds later is not complete."""

    name: str
    since_s: float


@dataclass(frozen=True)
class RankStatus:
    """A rank, when it was last heard of."""

    # rank, host, pid: Who it is.
    rank: int
    host: str
    pid: int
    # steps, rows: Since the start; None where nothing counts them.
    steps: int | None
    rows: int | None
    # operations, bytes: Collectives since the start, and what they have reduced or sent.
    operations: int
    bytes: int
    # computing, waiting, moving, hidden: Shares of the last interval: the rank did something else, waited for other
    # ranks, and waited for the bytes; and waited for either while the backward pass went on.
    computing: float
    waiting: float
    moving: float
    hidden: float
    # cores, delayed: In the last interval: the cores that its threads used, and the seconds in each second that they
    # were ready and had none.
    cores: float
    delayed: float
    place: str  # Where its main thread was; "" if that is not known.
    rss_bytes: int  # The memory that its process has.
    outstanding: tuple[Outstanding, ...]  # What it waits for.
    written: float  # When it was heard of, in seconds since 1970.


@dataclass(frozen=True)
class JobStatus:
    """A job, as its file has it. Times in seconds since 1970."""

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
    """The jobs of the user with this number, by their start. `time_s`: the time, in seconds since 1970."""
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
                raise ValueError(f"is old: it was written {silent_s:.0f} s ago, and the first rank (process {first}) "
                                 "has ended. Remove it")
            jobs.append(job)
        except FileNotFoundError:
            continue  # The job has just ended.
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    return Found(tuple(sorted(jobs, key=lambda job: job.started)), tuple(problems))


def _read_file(path: Path, uid: int) -> JobStatus:
    """Raises ValueError with what is wrong with it, or OSError."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8") as file:
        if (problem := foreign(os.fstat(file.fileno()), uid, 0o022)):
            raise ValueError(problem)
        text = file.read()
    try:
        content = json.loads(text)
    except ValueError:
        raise ValueError("is cut, or is no JSON") from None
    if not isinstance(content, dict) or content.get("version") != VERSION:
        version = content.get("version") if isinstance(content, dict) else None
        raise ValueError(f"is of version {version}, and this mpistrat reads version {VERSION}. Remove it if "
                         "its job has ended")
    try:
        return parse(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is incomplete: {error}. Another version of mpistrat has written it. Remove it if its job "
                         "has ended") from None


def parse(content: Mapping[str, Any]) -> JobStatus:
    """The content of a file. Fields that a later version may add are left out. Raises KeyError or TypeError."""
    ranks = []
    for each in content["ranks"]:
        outstanding = tuple(Outstanding(str(one["name"]), float(one["since_s"])) for one in each["outstanding"])
        values = {one.name: each[one.name] for one in fields(RankStatus)}
        ranks.append(RankStatus(**{**values, "outstanding": outstanding}))
    return JobStatus(str(content["job"]), float(content["started"]), float(content["written"]), int(content["size"]),
                     str(content["script"]), tuple(sorted(ranks, key=lambda rank: rank.rank)))
