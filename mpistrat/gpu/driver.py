"""CUDA's driver API by ctypes: current contexts, launches, events and UUIDs. Also loads NVRTC, the compiler of kernels.

No function here creates a CUDA context. A rank must have a context on its own GPU only: a context takes about half a
gigabyte of GPU memory, and a GPU in exclusive mode allows only one process to have a context. The runtime API would
create contexts: since CUDA 12 cudaSetDevice does, and at the end of `with cupy.cuda.Device(n)` cupy calls
cudaSetDevice(0) in a thread that had no context.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from importlib import metadata
from typing import Any

from ..core.errors import EngineError
from ..core.install import pip_extra

_NOT_READY = 600  # CUDA_ERROR_NOT_READY


def context() -> int:
    """Return the address of this thread's current CUDA context; 0 if it has none."""
    found = ctypes.c_void_p()
    # The call reads a variable of the thread. So it keeps Python's lock, which another thread could otherwise take for
    # milliseconds. All other calls may block, as a launch does if a thousand launches are pending, perhaps because a
    # rank has died. Then another Python thread must be able to abort the work.
    _check("cuCtxGetCurrent", _library(ctypes.PyDLL).cuCtxGetCurrent(ctypes.byref(found)))
    return found.value or 0


class Selected:
    """A `with` context in which the CUDA context of this rank's GPU is current in this thread.

    At the end, a thread that had a different CUDA context before gets that context back. A thread that had none keeps
    this one, because the runtime API cannot remove a context without creating a new one. `own`: The address of this
    rank's context; 0 if it is not known yet. `select`: Makes this rank's context current.
    """

    __slots__ = ("_before", "_own", "_select")

    def __init__(self, own: int, select: Callable[[], None]):
        self._own, self._select = own, select

    def __enter__(self) -> None:
        self._before = context()
        if not self._own or self._before != self._own:
            self._select()

    def __exit__(self, *_: object) -> None:
        if self._before and self._before != self._own:
            _call("cuCtxSetCurrent", ctypes.c_void_p(self._before))


def launch(function: int, blocks: int, threads: int, stream: int, arguments: Sequence[Any]) -> None:
    """Launch a kernel on a stream, with `blocks` thread blocks per grid and `threads` threads per block.

    `function`, `stream`: Addresses. `arguments`: Objects of ctypes. The driver copies them before it returns.
    """
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    _call("cuLaunchKernel", ctypes.c_void_p(function), blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream),
          addresses, None)


def uuid(number: int) -> str:
    """Return the UUID of the GPU with CUDA's index `number`: 32 hexadecimal digits, unique among all hosts.

    Instances of a divided GPU (MIG) get the UUID of the whole GPU. cuDeviceGetUuid_v2 would distinguish the instances.
    But NCCL compares PCI bus ids, takes two instances for one GPU, and refuses them ("Duplicate GPU detected").
    """
    device, digits = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
    _call("cuDeviceGetUuid", digits, device)
    return bytes(digits).hex()


def is_done(event: int) -> bool:
    """Return whether the GPU has reached an event. Raises EngineError if the GPU has failed.

    This calls the driver, because the runtime's cudaEventQuery stores "not ready" as the last error of the process, and
    other libraries then report this error: https://github.com/pytorch/pytorch/issues/18584.
    """
    status = _library(ctypes.CDLL).cuEventQuery(ctypes.c_void_p(event))
    if status not in (0, _NOT_READY):
        raise EngineError(f"the GPU has failed with CUDA's status {status}")
    return bool(status == 0)


def write_number(address: int, number: int, words: int, stream: int) -> None:
    """Enqueue a write of the integer `number`, which has 32 * `words` bits, to GPU memory. Uses no host memory."""
    for word in range(words):
        _call("cuMemsetD32Async", ctypes.c_uint64(address + 4 * word), ctypes.c_uint(number >> 32 * word & 0xFFFFFFFF),
              ctypes.c_size_t(1), ctypes.c_void_p(stream))


def record_in_context(context: int, event: int) -> None:
    """Record an event after all work enqueued so far in a CUDA context. Needs a driver for CUDA 12.5 or later."""
    _call("cuCtxRecordEvent", ctypes.c_void_p(context), ctypes.c_void_p(event))


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_library(ctypes.CDLL), name, None)
    if function is None:
        raise EngineError(f"CUDA's driver has no function {name}")
    _check(name, function(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise EngineError(f"CUDA's {name} has failed with status {status}")


@cache
def _library(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    """Return CUDA's driver, initialised. `kind`: CDLL, whose calls release the GIL, or PyDLL, whose calls keep it.

    Raises EngineError: The driver cannot be loaded or initialised.
    """
    try:
        status = ctypes.CDLL("libcuda.so.1").cuInit(0)  # May be repeated.
    except OSError as error:
        raise EngineError(f"CUDA's driver cannot be loaded: {error}") from error
    if status:
        raise EngineError(f"CUDA's cuInit has failed with status {status}")
    return kind("libcuda.so.1")


# -- NVRTC -------------------------------------------------------------------------------------------------------------

# The wheel of each CUDA version, and its extra of mpistrat.
_NVRTC = {12: ("nvidia-cuda-nvrtc-cu12", "gpu"), 13: ("nvidia-cuda-nvrtc", "gpu13")}


def load_nvrtc(cuda: int) -> None:
    """Load libnvrtc of this CUDA version (12 or 13) into the process, so that cupy can open it by its name.

    cupy 13 finds libnvrtc only by the dynamic linker, which does not search wheels. cupy 14 searches them. Does nothing
    if the linker finds libnvrtc. May be called again.

    Raises OSError: libnvrtc is not installed. The message says how to install it.
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
