"""TensorFlow's C API for operations and kernels, called through ctypes. This module knows nothing of collectives.

The functions are declared in
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/c/kernels.h and in ops.h, tf_status.h and tf_tensor.h
in the same directory.

TensorFlow passes an asynchronous kernel the address of `done`, a C++ std::function<void()>. The kernel calls `done`
when the operation is complete, which may be after the kernel has returned. TensorFlow 2.21 and earlier destroy
`done` when the kernel returns: https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/c/kernels.cc#L258
So the class Done moves the function elsewhere, as a C++ kernel would: it copies the bytes of the function, and makes
the original empty. Later versions of TensorFlow pass the address of a copy on the heap. Done leaves that copy in place,
because TF_RunAsyncOpKernelDoneCallback deletes it.

A std::function of libstdc++ has 32 bytes: 16 bytes for the object that it holds; the address of its *manager*, which
copies and destroys the object, or NULL for an empty function; and the address of its *invoker*, which calls the object.
Before any kernel runs, a test checks this layout and finds out who deletes the function. The test passes TensorFlow a
std::function whose manager and invoker are Python functions.
"""

import ctypes
import os
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from functools import cache
from typing import Any

import tensorflow as tf

_Strings = (c_void_p, c_char_p)
_PROTOTYPES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_NewStatus": (c_void_p, ()),
    "TF_DeleteStatus": (None, (c_void_p,)),
    "TF_GetCode": (c_int, (c_void_p,)),
    "TF_Message": (c_char_p, (c_void_p,)),
    "TF_SetStatus": (None, (c_void_p, c_int, c_char_p)),
    "TF_NewOpDefinitionBuilder": (c_void_p, (c_char_p,)),
    "TF_OpDefinitionBuilderAddAttr": (None, _Strings),
    "TF_OpDefinitionBuilderAddInput": (None, _Strings),
    "TF_OpDefinitionBuilderAddOutput": (None, _Strings),
    "TF_OpDefinitionBuilderSetIsStateful": (None, (c_void_p, c_bool)),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, (c_void_p, c_void_p)),
    "TF_ShapeInferenceContextSetUnknownShape": (None, (c_void_p, c_void_p)),
    "TF_RegisterOpDefinition": (None, (c_void_p, c_void_p)),
    "TF_NewAsyncKernelBuilder": (c_void_p, (c_char_p, c_char_p, c_void_p, c_void_p, c_void_p)),
    "TF_KernelBuilder_HostMemory": (None, _Strings),
    "TF_RegisterKernelBuilder": (None, (c_char_p, c_void_p, c_void_p)),
    "TF_GetInput": (None, (c_void_p, c_int, POINTER(c_void_p), c_void_p)),
    "TF_NumDims": (c_int, (c_void_p,)),
    "TF_Dim": (c_int64, (c_void_p, c_int)),
    "TF_TensorData": (c_void_p, (c_void_p,)),
    "TF_DeleteTensor": (None, (c_void_p,)),
    "TF_NewTensor": (c_void_p, (c_int, POINTER(c_int64), c_int, c_void_p, c_size_t, c_void_p, c_void_p)),
    "TF_SetOutput": (None, (c_void_p, c_int, c_void_p, c_void_p)),
    "TF_OpKernelContext_Failure": (None, (c_void_p, c_void_p)),
    "TF_GetFrameId": (c_uint64, (c_void_p,)),
    "TF_GetIterId": (c_int64, (c_void_p,)),
}
# Python's lock is released in these: an allocation waits until memory is freed, and the second function runs the code
# of TensorFlow at the end of an operation. A release costs a switch of threads, so the functions above keep the lock.
_UNLOCKED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_ForwardInputOrAllocateOutput": (c_void_p, (c_void_p, POINTER(c_int), c_int, c_int, POINTER(c_int64), c_int,
                                                   POINTER(c_int), c_void_p)),
    "TF_RunAsyncOpKernelDoneCallback": (None, (c_void_p,)),
}
# A method with a parameter of the type std::function<void()> of libstdc++. Other standard libraries name it otherwise.
_LIBSTDCPP = "_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextESt8functionIFvvEE"


class CApi:
    """The C API's functions, as attributes. Raises OSError: no library; AttributeError: a function is missing."""

    def __init__(self, path: str):
        for loaded, prototypes in ((ctypes.PyDLL(path), _PROTOTYPES), (ctypes.CDLL(path), _UNLOCKED)):
            for name, (result, arguments) in prototypes.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)
        self.is_of_libstdcpp = hasattr(loaded, _LIBSTDCPP)

    def __getattr__(self, name: str) -> Any:  # For mypy: all of them are set above.
        raise AttributeError(name)


@cache
def api() -> CApi | None:
    """Return TensorFlow's C API for kernels; None if this build of TensorFlow does not export it."""
    try:
        return CApi(os.path.join(tf.sysconfig.get_lib(), "libtensorflow_framework.so.2"))
    except (OSError, AttributeError):
        return None


def require_api() -> CApi:
    """Return the C API. Only for use after a check that the API exists, for example by kernel.why_not()."""
    found = api()
    assert found is not None, "why_not was not called"
    return found


class Status:
    """A TF_Status. Not thread-safe."""

    __slots__ = ("_api", "pointer")

    def __init__(self) -> None:
        self._api = require_api()
        self.pointer: int = self._api.TF_NewStatus()

    def check(self) -> None:
        """Raise RuntimeError with the message of the status, unless the status is OK."""
        if self._api.TF_GetCode(self.pointer):
            raise RuntimeError(self._api.TF_Message(self.pointer).decode(errors="replace"))

    def set(self, code: int, message: str) -> None:
        """Set an error: `code` is one of the error codes of tf.errors."""
        self._api.TF_SetStatus(self.pointer, code, message.replace("\0", " ").encode())

    def __del__(self) -> None:
        self._api.TF_DeleteStatus(self.pointer)


# -- done --------------------------------------------------------------------------------------------------------------

_DESTROY = 3  # of the manager's operations: std::_Manager_operation

_Manager = ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p, c_int)
_Invoker = ctypes.CFUNCTYPE(None, c_void_p)


class _Function(ctypes.Structure):
    _fields_ = (("held", c_void_p * 2), ("manager", c_void_p), ("invoker", c_void_p))


class Done:
    """The callback that completes one call of a kernel. Made before the kernel returns. Any thread may call `run`."""

    __slots__ = ("_address", "_own")

    def __init__(self, address: int):
        self._address, self._own = address, None
        if not is_deleted_by_tensorflow():
            given = _Function.from_address(address)
            self._own = _Function.from_buffer_copy(given)
            given.manager = given.invoker = None

    def run(self) -> None:
        """Tell TensorFlow that the operation is complete. To be called once. Releases Python's lock during the call."""
        run = require_api().TF_RunAsyncOpKernelDoneCallback
        if self._own is None:
            run(self._address)
            return
        own = ctypes.addressof(self._own)
        run(own)
        _Manager(self._own.manager)(own, own, _DESTROY)


@cache
def is_deleted_by_tensorflow() -> bool | None:
    """Return whether TF_RunAsyncOpKernelDoneCallback deletes its argument; None if the layout is unknown."""
    own = api()
    if own is None or not own.is_of_libstdcpp:
        return None
    called: list[str] = []

    @_Manager
    def manager(target: int, source: int, operation: int) -> bool:
        called.append("destroyed" if operation == _DESTROY else "managed")
        return False

    @_Invoker
    def invoker(held: int) -> None:
        called.append("invoked")

    # `delete` gives memory back to the C library.
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = c_void_p, (c_size_t,)
    library.free.argtypes = (c_void_p,)
    made = library.malloc(ctypes.sizeof(_Function))
    function = _Function.from_address(made)
    function.manager, function.invoker = ctypes.cast(manager, c_void_p), ctypes.cast(invoker, c_void_p)
    own.TF_RunAsyncOpKernelDoneCallback(made)
    if called == ["invoked"]:
        library.free(made)
        return False
    return True if called == ["invoked", "destroyed"] else None
