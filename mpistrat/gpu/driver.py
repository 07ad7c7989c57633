"""CUDA's driver by ctypes: contexts of threads, launches, events and UUIDs; and NVRTC, the compiler of kernels.

Nothing here creates a context. A context takes about half a gigabyte of a GPU, and only one process may have a context
if the GPU is in exclusive mode. So a rank must have no context on another GPU than its own. Since CUDA 12 cudaSetDevice
creates a context. For the runtime, a thread without a context is on GPU 0, and `with cupy.cuda.Device(n)` calls
cudaSetDevice(0) at its end.
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
    """The address of this thread's current context; 0 if it has none."""
    found = ctypes.c_void_p()
    # The call reads a variable of the thread. So it keeps Python's lock, which another thread could otherwise take for
    # milliseconds. All other calls may block, as a launch does if a thousand launches are pending, perhaps because a
    # rank has died. Then another Python thread must be able to abort the work.
    _check("cuCtxGetCurrent", _library(ctypes.PyDLL).cuCtxGetCurrent(ctypes.byref(found)))
    return found.value or 0


class Selected:
    """A `with` context in which `own` is the current CUDA context of this thread. `select` makes it current.

    Afterwards a thread that had another CUDA context gets it back. A thread that had none keeps `own`: the runtime has
    no call that removes a context without creating another one. So the threads of the engine select their GPU once.
    `own` is the address of the CUDA context; 0 if it is not known yet.
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
    """Launch a kernel (a CUfunction) on a stream, both by their addresses; blocks per grid, and threads per block.

    The driver copies the arguments, which are objects of ctypes, before it returns.
    """
    addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    _call("cuLaunchKernel", ctypes.c_void_p(function), blocks, 1, 1, threads, 1, 1, 0, ctypes.c_void_p(stream),
          addresses, None)


def uuid(number: int) -> str:
    """The UUID of the GPU with CUDA's index `number` in this process: 32 hexadecimal digits, unique among all hosts.

    Instances of a divided GPU (MIG) get the UUID of the whole GPU. cuDeviceGetUuid_v2 would distinguish them, but NCCL
    refuses them as one GPU ("Duplicate GPU detected"), because NCCL compares PCI bus ids.
    """
    device, digits = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(number))
    _call("cuDeviceGetUuid", digits, device)
    return bytes(digits).hex()


def is_done(event: int) -> bool:
    """Whether the GPU has reached an event. Raises EngineError if it has failed.

    The runtime's cudaEventQuery leaves "not ready" as the last error, which other libraries of the process then find:
    https://github.com/pytorch/pytorch/issues/18584. The driver has no last error.
    """
    status = _library(ctypes.CDLL).cuEventQuery(ctypes.c_void_p(event))
    if status not in (0, _NOT_READY):
        raise EngineError(f"the GPU has failed with CUDA's status {status}")
    return bool(status == 0)


def write_number(address: int, number: int, words: int, stream: int) -> None:
    """Enqueue the write of an integer of `words` words of 32 bits to GPU memory. No host memory is used."""
    for word in range(words):
        _call("cuMemsetD32Async", ctypes.c_uint64(address + 4 * word), ctypes.c_uint(number >> 32 * word & 0xFFFFFFFF),
              ctypes.c_size_t(1), ctypes.c_void_p(stream))


def record_in_context(context: int, event: int) -> None:
    """Record an event after all work that is enqueued in a CUDA context. The driver has it from version 12.5 on."""
    _call("cuCtxRecordEvent", ctypes.c_void_p(context), ctypes.c_void_p(event))


def _call(name: str, *arguments: Any) -> None:
    function = getattr(_library(ctypes.CDLL), name, None)
    if function is None:
        raise EngineError(f"CUDA's driver has no {name}")
    _check(name, function(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise EngineError(f"CUDA's {name} has failed with status {status}")


@cache
def _library(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    """The initialised driver, as a CDLL, whose calls release Python's lock, or as a PyDLL, whose calls keep it.

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
    """Make libnvrtc of this CUDA version (12 or 13) known to the process, under the name by which cupy opens it.

    cupy 13 looks for libnvrtc only where the dynamic linker does, which does not search wheels; cupy 14 finds wheels.
    Does nothing if the linker finds libnvrtc. May be called again.

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
