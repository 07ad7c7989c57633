"""XLA's FFI, the C API for functions that compiled code calls, through ctypes. This module has no collectives.

The structures, and their names, are those of
https://github.com/tensorflow/tensorflow/blob/v2.21.0/third_party/xla/xla/ffi/api/c_api.h
XLA promises that a version of this interface works for at least 12 months after the next version appears. Each
structure begins with its size, which tells XLA the version.

A *handler* is the function that compiled code calls. It runs in the thread that has called the compiled function, or in
a thread of XLA. XLA may have only one thread, which other compiled functions need too. So a handler must not wait for
other ranks there. Instead, it returns a *future*, and any thread completes the future later. Until then XLA runs work
that does not depend on the call, and keeps the memory of arguments and results.

On a GPU XLA calls a handler when it launches the kernels, in order. There a future is of no use, because XLA blocks the
thread until the future is complete:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/third_party/xla/xla/backends/gpu/runtime/custom_call_thunk.cc
The traits of a handler are 0. So XLA does not record its calls in CUDA graphs, which would replay only the kernels.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p, sizeof
from functools import cache
from typing import Any

import tensorflow as tf

from ..bridge.python_op import array_at

_METADATA_EXTENSION = 1
_EXECUTE = 3
_MAJOR = 0


class ByteSpan(Structure):
    _fields_ = (("ptr", c_char_p), ("len", c_size_t))


class Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p), ("major", c_int), ("minor", c_int))


class Metadata(Structure):
    """XLA_FFI_Metadata without the last field, which is only for handlers that have a state."""

    _fields_ = (("struct_size", c_size_t), ("version", Version), ("traits", c_uint32))


class Extension(Structure):
    """XLA_FFI_Metadata_Extension. Its first three fields are those of every extension."""

    _fields_ = (("struct_size", c_size_t), ("type", c_int), ("next", c_void_p), ("metadata", POINTER(Metadata)))


class Buffer(Structure):
    """One argument or result. `dims` has `rank` sizes. The memory is in C order, as custom_call demands."""

    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p), ("dtype", c_int), ("data", c_void_p),
                ("rank", c_int64), ("dims", POINTER(c_int64)))


class Buffers(Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p), ("size", c_int64), ("types", c_void_p),
                ("buffers", POINTER(POINTER(Buffer))))


class Scalar(Structure):
    _fields_ = (("dtype", c_int), ("value", POINTER(c_int64)))


class Attributes(Structure):
    """The attributes of a call, sorted by name. Calls of mpistrat have one attribute, a 64-bit integer."""

    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p), ("size", c_int64), ("types", c_void_p),
                ("names", c_void_p), ("attrs", POINTER(POINTER(Scalar))))


class CallFrame(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension_start", POINTER(Extension)), ("api", c_void_p),
                ("ctx", c_void_p), ("stage", c_int), ("args", Buffers), ("rets", Buffers), ("attrs", Attributes),
                ("future", c_void_p))


class Bundle(Structure):
    _fields_ = (("instantiate", c_void_p), ("prepare", c_void_p), ("initialize", c_void_p), ("execute", c_void_p))


def _arguments(**fields: object) -> type[Structure]:
    """Return the structure for the arguments of a function of the API."""
    head = ("struct_size", c_size_t), ("extension_start", c_void_p)
    return type("Arguments", (Structure,), {"_fields_": (*head, *fields.items())})


RegisterArgs = _arguments(name=ByteSpan, platform=ByteSpan, bundle=Bundle, traits=c_uint32)
ErrorCreateArgs = _arguments(message=c_char_p, code=c_int32)
ErrorMessageArgs = _arguments(error=c_void_p, message=c_char_p)
ErrorDestroyArgs = _arguments(error=c_void_p)
FutureCreateArgs = FutureAvailableArgs = _arguments(future=c_void_p)
FutureErrorArgs = _arguments(future=c_void_p, error=c_void_p)
StreamGetArgs = _arguments(ctx=c_void_p, stream=c_void_p)
DeviceOrdinalGetArgs = _arguments(ctx=c_void_p, device_ordinal=c_int32)

_FUNCTIONS = ("error_create", "error_message", "error_destroy", "handler_register", "stream_get", "type_register",
              "context_get", "state_set", "state_get", "memory_allocate", "memory_free", "pool_schedule",
              "pool_threads", "future_create", "future_available", "future_error", "run_id_get", "device_ordinal_get")


class Api(Structure):
    """The first fields of XLA_FFI_Api, a table of functions. The library does not export these functions by name."""

    _fields_ = (("struct_size", c_size_t), ("extension_start", c_void_p), ("version", Version), ("internal", c_void_p),
                *((name, c_void_p) for name in _FUNCTIONS))


# A function of the API, and a handler, return an error or NULL. The interpreter's lock is released meanwhile, since a
# future that becomes available may run code of XLA's. The two functions that take an error return nothing.
_ApiFunction = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_OfError = ctypes.CFUNCTYPE(None, c_void_p)
_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(CallFrame))
_handlers: list[Any] = []  # XLA calls them until the process ends.


@cache
def api() -> Api | None:
    """Return the API of the loaded TensorFlow; None if TensorFlow has no such API or an incompatible version of it."""
    try:
        library = ctypes.CDLL(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
        get = library.XLA_FFI_GetApi
    except (OSError, AttributeError):  # Other platforms, and TensorFlow before 2.21.
        return None
    get.restype = POINTER(Api)
    found: Api = get().contents
    return found if found.version.major == _MAJOR and found.struct_size >= sizeof(Api) else None


def _call(function: str, arguments: Structure) -> None:
    """Call a function of the API. Raises RuntimeError: The function returned an error."""
    own = api()
    assert own is not None
    arguments.struct_size = sizeof(arguments)
    error = _ApiFunction(getattr(own, function))(byref(arguments))
    if error:
        text = ErrorMessageArgs(sizeof(ErrorMessageArgs), None, error)
        _OfError(own.error_message)(byref(text))
        message = text.message.decode()
        _OfError(own.error_destroy)(byref(ErrorDestroyArgs(sizeof(ErrorDestroyArgs), None, error)))
        raise RuntimeError(f"the function {function} of XLA's FFI has failed: {message}")


def _error(message: str, code: int) -> int:
    """Create an error, and return its address. Pass it to XLA, which deletes it."""
    own = api()
    assert own is not None
    arguments = ErrorCreateArgs(sizeof(ErrorCreateArgs), None, message.encode(), code)
    error: int = _ApiFunction(own.error_create)(byref(arguments))
    return error


_AsArray = Callable[[int, tuple[int, ...], Any], Any]  # Makes an array of an address, a shape and a dtype.


class Call:
    """A call of the handler by compiled code."""

    def __init__(self, frame: CallFrame):
        self._frame = frame
        self.number: int = frame.attrs.attrs[0].contents.value[0]  # The integer that the program passes.

    def arguments(self, dtypes: Sequence[Any], array: _AsArray = array_at) -> list[Any]:
        """Return the arguments, by default as views of host memory. Do not write to them."""
        return _arrays(self._frame.args, dtypes, array)

    def results(self, dtypes: Sequence[Any], array: _AsArray = array_at) -> list[Any]:
        """Return the memory in which XLA expects the results, by default as views of host memory."""
        return _arrays(self._frame.rets, dtypes, array)

    def stream(self) -> int:
        """Return the address of the CUDA stream of the work before and after the call. Only for calls on a GPU."""
        found = StreamGetArgs(ctx=self._frame.ctx)
        _call("stream_get", found)
        return int(found.stream or 0)

    def device_number(self) -> int:
        """Return CUDA's index of the GPU that runs the program. Only for calls on a GPU."""
        found = DeviceOrdinalGetArgs(ctx=self._frame.ctx)
        _call("device_ordinal_get", found)
        return int(found.device_ordinal)

    def complete_later(self) -> "Future":
        """Return a future, so that the handler may return before the results are complete."""
        created = FutureCreateArgs()
        _call("future_create", created)
        self._frame.future = created.future
        return Future(created.future)


def _arrays(buffers: Buffers, dtypes: Sequence[Any], array: _AsArray) -> list[Any]:
    each = (buffers.buffers[i].contents for i in range(len(dtypes)))
    return [array(buffer.data or 0, tuple(buffer.dims[:buffer.rank]), dtype)
            for buffer, dtype in zip(each, dtypes, strict=True)]


class Future:
    """A call that was not complete when its handler returned. One of the methods must be called once, in any thread."""

    def __init__(self, pointer: int):
        self._pointer = pointer

    def set_available(self) -> None:
        """Tell XLA that the results are complete."""
        _call("future_available", FutureAvailableArgs(future=self._pointer))

    def set_error(self, message: str, code: int) -> None:
        """Fail the call, and with it the execution of the compiled function."""
        _call("future_error", FutureErrorArgs(future=self._pointer, error=_error(message, code)))


def register(name: str, platform: str, execute: Callable[[Call], tuple[str, int] | None]) -> None:
    """Register the handler of all custom calls that programs make by this name. To be called once in a process.

    Args:
        platform: "Host" for code on the CPU; "CUDA" for a GPU, with arguments and results in GPU memory.
        execute: Called for each call. It returns None, or the text and the code of an error. It must not raise.
    """
    def handle(pointer: "ctypes._Pointer[CallFrame]") -> int | None:
        frame = pointer.contents
        if frame.extension_start and frame.extension_start.contents.type == _METADATA_EXTENSION:
            # XLA asks what the handler needs.
            metadata, own = frame.extension_start.contents.metadata.contents, api()
            assert own is not None
            metadata.version.major, metadata.version.minor, metadata.traits = own.version.major, own.version.minor, 0
            return None
        assert frame.stage == _EXECUTE
        failure = execute(Call(frame))
        return None if failure is None else _error(*failure)

    handler = _Handler(handle)
    _handlers.append(handler)
    label, where = name.encode(), platform.encode()
    _call("handler_register", RegisterArgs(
        name=ByteSpan(label, len(label)), platform=ByteSpan(where, len(where)),
        bundle=Bundle(execute=ctypes.cast(handler, c_void_p))))
