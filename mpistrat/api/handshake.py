"""What the ranks tell each other in init(), before anything else, and what is odd about it when they are compared."""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import SettingsError
from ..core.settings import Settings


@dataclass(frozen=True)
class RankInfo:
    """What each rank tells all others in init(), before anything else."""

    host: str
    memory_group: int
    settings: Settings | None
    problem: str
    versions: dict[str, str]
    script: str


def exchange_info(mpi: Any, comm: Any) -> list[RankInfo]:
    shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
    memory_group = shared.bcast(comm.Get_rank())
    shared.Free()
    settings, problem = None, ""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        problem = str(error)
    introduction = RankInfo(platform.node(), memory_group, settings, problem, versions(), script_digest())
    return [from_text(text) for text in comm.allgather(to_text(introduction))]


def to_text(introduction: RankInfo) -> str:
    """The form in which an introduction travels."""
    return json.dumps(dataclasses.asdict(introduction))


def from_text(text: str) -> RankInfo:
    """The inverse of to_text."""
    values = json.loads(text)
    settings = values.pop("settings")
    return RankInfo(settings=None if settings is None else Settings(**settings), **values)


def versions() -> dict[str, str]:
    versions = {"Python": platform.python_version()}
    for package in ("mpistrat", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def script_digest() -> str:
    """A digest of the file that was started, or a text that says there is none."""
    try:
        with open(sys.argv[0], "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, IndexError):
        return "no file"


def differences(everybody: Sequence[RankInfo]) -> list[str]:
    """A sentence for each version, and for the script, that is not the same on all ranks."""
    subjects = {f"version of {name}": [o.versions[name] for o in everybody] for name in everybody[0].versions}
    subjects[f"content of the script {sys.argv[0]}"] = [o.script[:12] for o in everybody]
    sentences = []
    for subject, values in subjects.items():
        ranks: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            ranks.setdefault(value, []).append(rank)
        if len(ranks) > 1:
            sentences.append(f"The ranks differ in the {subject}: "
                             + "; ".join(f"{value} on ranks {where}" for value, where in ranks.items()))
    return sentences
