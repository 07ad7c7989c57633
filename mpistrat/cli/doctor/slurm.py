"""Find the --mpi of srun that fits the MPI library, by starting two ranks with each value. For `mpistrat doctor`.

Run as a program, this module is one of the two ranks, and prints the size that MPI sees.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from ..findings import say, understood

_TRY_S = 20.0


def sizes_of_srun(environ: Mapping[str, str]) -> dict[str, int]:
    """Start two ranks under `srun` with each value of --mpi, and return the size that MPI sees; 0 for a failure.

    The key "" is srun without --mpi, which is tried first. The trials end at the first value with which MPI sees both
    ranks. {} outside of an allocation of Slurm, and in an allocation of one task, which has no place for two ranks.
    """
    srun = shutil.which("srun", path=environ.get("PATH"))
    if srun is None or "SLURM_JOB_ID" not in environ or environ.get("SLURM_NTASKS", "2") == "1":
        return {}
    sizes = {"": _size(srun, [])}
    for name in _names(srun) if sizes[""] != 2 else []:
        sizes[name] = _size(srun, [f"--mpi={name}"])
        if sizes[name] == 2:
            break
    return sizes


def _names(srun: str) -> list[str]:
    """Return the values of --mpi with which srun can start ranks, PMIx first."""
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed(done.stdout + done.stderr)


def listed(text: str) -> list[str]:
    """Return the values of --mpi in the output of `srun --mpi=list`, in the format of any version of Slurm. Pure."""
    words = re.findall(r"\b(?:pmix\w*|pmi2|cray_shasta)\b", text)
    return sorted(dict.fromkeys(words), key=lambda word: (not word.startswith("pmix"), len(word), word))


def _size(srun: str, options: list[str]) -> int:
    try:
        done = subprocess.run([srun, *options, "-n", "2", "--overlap", sys.executable, "-m", __name__],
                              stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TRY_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = [each["size"] for each in understood(done.stdout)]
    return min(found) if len(found) == 2 else 0


if __name__ == "__main__":
    from mpi4py import MPI
    say("size", size=MPI.COMM_WORLD.Get_size())
