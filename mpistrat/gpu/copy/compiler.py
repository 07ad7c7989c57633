"""Compiles kernels for the current GPU, by cupy and NVRTC.

Imports cupy, so only gpu/device.py imports this module. Any thread may call it.
"""

import cupy
from cupy.cuda import compiler

from ...core.errors import EngineError
from .nvrtc import load_nvrtc

# Denormal floats are not flushed to zero.
OPTIONS = ("-std=c++17", "-ftz=false")


def compiled(code: str) -> bytes:
    """Return the machine code of a kernel for the current GPU. Any thread, within `Device.current()`.

    Not by cupy's RawModule, which appends -ftz=true to the options.

    Raises:
        EngineError: NVRTC does not work, or rejects the code. The error has the compiler's message.
    """
    try:
        find_nvrtc()
        binary: bytes = compiler.compile_using_nvrtc(code, OPTIONS, cache_in_memory=True)[0]
    except (RuntimeError, OSError, compiler.CompileException) as error:
        raise EngineError(f"a kernel cannot be compiled: {error}") from error
    return binary


def find_nvrtc() -> None:
    """Load NVRTC, if cupy does not find it. Raises OSError if NVRTC is not installed."""
    try:
        compiler.nvrtc.getVersion()  # cupy's own way
    except RuntimeError:
        load_nvrtc(cupy.cuda.driver.get_build_version() // 1000)
