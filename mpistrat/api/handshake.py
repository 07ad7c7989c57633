"""The init() handshake: ranks exchange host, settings and versions, and report differences.

It is the first communication of a job. `exchange_info` is collective; the other functions are local.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from ..core.errors import SettingsError
from ..core.install import pip_extra
from ..core.settings import Settings
from ..core.topology import describe_by_rank, rank_list, ranks_by_value
from ..core.version import __version__
from ..process import procfs
from ..process.cores import own_cpus

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class RankInfo:
    """The facts that a rank sends to all other ranks in init()."""

    host: str
    memory_group: int  # The lowest rank that shares memory with this rank.
    settings: Settings | None  # The settings of the rank; None if they are not valid.
    problem: str  # The error in the settings, or "".
    # The versions of Python and of packages, by name; "none" for a package that is not installed.
    versions: dict[str, str]
    script: str  # A digest of the script.
    cpus: list[int]  # The CPUs that the rank may use.
    # The process of the rank, as the first four fields of procfs.Process; None if /proc does not show it.
    process: tuple[int, int, int, int] | None


def exchange_info(mpi: ModuleType, comm: "MPI.Comm", hosts: Sequence[str] = ()) -> list[RankInfo]:
    """Return the RankInfo of every rank, in rank order. Collective over `comm`. Raises the errors of from_texts.

    `hosts`: The host of each rank, if known. Ranks that share memory have equal hosts.
    """
    if hosts:
        memory_group = hosts.index(hosts[comm.Get_rank()])
    else:
        shared = comm.Split_type(mpi.COMM_TYPE_SHARED)
        memory_group = shared.bcast(comm.Get_rank())
        shared.Free()
    settings, problem = None, ""
    try:
        settings = Settings.from_env(os.environ)
    except SettingsError as error:
        problem = str(error)
    process = procfs.find(os.getpid())
    own = RankInfo(platform.node(), memory_group, settings, problem, versions(), script_digest(), sorted(own_cpus()),
                   None if process is None else (process.pid, process.started, process.parent, process.group))
    return from_texts(comm.allgather(to_text(own)))


def to_text(info: RankInfo) -> str:
    """Encode a RankInfo as JSON, for sending."""
    return json.dumps(dataclasses.asdict(info))


def from_texts(texts: Sequence[str]) -> list[RankInfo]:
    """Decode the results of to_text of all ranks, in rank order.

    Raises SettingsError: On all ranks, if they have different versions of mpistrat. The text names the versions.
    """
    received = [json.loads(text) for text in texts]
    versions = [each.get("versions", {}).get("mpistrat", "unknown") for each in received]
    if len(set(versions)) > 1:
        raise SettingsError("The ranks have different versions of mpistrat, which cannot run together: "
                            f"{describe_by_rank(versions)}. Install the same version on all hosts.")
    return [RankInfo(**{**each, "settings": None if each["settings"] is None else Settings(**each["settings"])})
            for each in received]


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that should be the same on all ranks, by name."""
    found = {"Python": platform.python_version(), "mpistrat": __version__}
    # cupy has a package for each version of CUDA.
    for name, *packages in (("tensorflow",), ("tensorflow-cpu",), ("keras",), ("numpy",),
                            ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")):
        found[name] = "none"
        for package in packages or (name,):
            with suppress(importlib.metadata.PackageNotFoundError):
                found[name] = importlib.metadata.version(package)
    return found


def script_digest() -> str:
    """Return the SHA-256 of the script that Python was started with, or "no file"."""
    try:
        with open(_script(), "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return "no file"


def _script() -> str:
    """Return the path of the script that Python was started with; "" if a program that embeds Python gave none."""
    return sys.argv[0] if sys.argv else ""


def problems(infos: Sequence[RankInfo]) -> str:
    """Return the errors in the ranks' settings, one text for all ranks with the same error; "" if there are none."""
    ranks = ranks_by_value(info.problem for info in infos)
    ranks.pop("", None)
    return " ".join(f"{'all ranks' if len(where) == len(infos) else f'ranks {rank_list(where)}'}: {problem}"
                    for problem, where in ranks.items())


def differences(infos: Sequence[RankInfo]) -> list[str]:
    """Return a sentence for each version that differs among the ranks, and one if the script differs."""
    subjects = {f"version of {name}": [info.versions[name] for info in infos] for name in infos[0].versions}
    subjects[f"content of the script {_script()}"] = [info.script[:12] for info in infos]
    sentences = []
    for subject, values in subjects.items():
        if len(set(values)) > 1:
            sentences.append(f"The ranks differ in the {subject}: {describe_by_rank(values)}")
    return sentences


def without_cupy(infos: Sequence[RankInfo]) -> str:
    """Return a warning if some ranks have cupy and others do not, so that all reduce GPU tensors on the host; or ""."""
    lacking = [rank for rank, info in enumerate(infos) if info.versions.get("cupy", "none") == "none"]
    return "" if len(lacking) in (0, len(infos)) else (
        f"Ranks {rank_list(lacking)} have no cupy ({pip_extra('gpu')}), so tensors on GPUs are copied to the host and "
        "reduced there on all ranks.")
