"""Loads NVRTC, the compiler of kernels, from NVIDIA's wheel, where there is no CUDA toolkit.

Called by copy/compiler.py.
"""

import ctypes
from importlib import metadata

from ...core.install import pip_extra

# The wheel of each CUDA version, and its extra of mpistrat.
_NVRTC = {12: ("nvidia-cuda-nvrtc-cu12", "gpu"), 13: ("nvidia-cuda-nvrtc", "gpu13")}


def load_nvrtc(cuda: int) -> None:
    """Make libnvrtc of this CUDA version (12 or 13) known to the process, under the name by which cupy opens it.

    cupy 13 looks for libnvrtc only where the dynamic linker does, which does not search wheels; cupy 14 finds wheels.
    Does nothing if the linker finds libnvrtc. May be called again.

    Raises:
        OSError: libnvrtc is not installed. The message says how to install it.
    """
    name = f"libnvrtc.so.{cuda}"
    try:
        ctypes.CDLL(name)
        return
    except OSError as error:
        path = _in_wheel(cuda, name)
        if path is None:
            extra = f" ({pip_extra(_NVRTC[cuda][1])})" if cuda in _NVRTC else ""
            raise OSError(f"{error}{extra}") from error
    ctypes.CDLL(path)


def _in_wheel(cuda: int, name: str) -> str | None:
    try:
        wheel = metadata.distribution(_NVRTC[cuda][0])
    except (KeyError, metadata.PackageNotFoundError):
        return None
    return next((str(file.locate()) for file in wheel.files or () if file.name == name), None)
