"""What NVRTC makes of a kernel, without a GPU."""

import pytest


def ptx_of(code: str, architecture: str) -> str:
    """A kernel compiled with the options that the package uses. Skips the test where cupy or NVRTC is missing."""
    pytest.importorskip("cupy", reason="cupy is not installed")
    from cupy.cuda import compiler

    from mpistrat.gpu.device import OPTIONS, find_nvrtc
    try:
        find_nvrtc()
    except OSError as error:
        pytest.skip(f"no NVRTC: {error}")
    program = compiler.nvrtc.createProgram(code, "kernel.cu", [], [])
    try:
        compiler.nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *OPTIONS))
        ptx: str = compiler.nvrtc.getPTX(program).decode()
    finally:
        compiler.nvrtc.destroyProgram(program)
    return ptx
