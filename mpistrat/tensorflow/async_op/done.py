"""The hand-over of `done`, the C++ function by which a kernel tells TensorFlow that it is complete.

TensorFlow passes the address of a std::function<void()>. Up to 2.21 that is an argument of its own, which ends when the
kernel returns, before an asynchronous kernel is complete:
https://github.com/tensorflow/tensorflow/blob/v2.21.0/tensorflow/c/kernels.cc#L258
So it is moved, as a C++ kernel would do: its bytes are copied, and the original is made empty. Later versions pass the
address of a copy, and TF_RunAsyncOpKernelDoneCallback deletes that. Such a one must stay where it is.

A std::function of libstdc++ has 32 bytes: 16 of what it holds, the address of its *manager*, which copies and destroys
that, or NULL if it is empty, and the address of its *invoker*, which calls it. Both facts are found out, before any
kernel runs, from a std::function whose manager and invoker are Python.
"""

import ctypes
from ctypes import c_bool, c_int, c_size_t, c_void_p
from functools import cache

from .c_api import api, require_api

_DESTROY = 3  # of the manager's operations: std::_Manager_operation

_Manager = ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p, c_int)
_Invoker = ctypes.CFUNCTYPE(None, c_void_p)


class _Function(ctypes.Structure):
    _fields_ = (("held", c_void_p * 2), ("manager", c_void_p), ("invoker", c_void_p))


class Done:
    """A kernel's `done`. Construct it before the kernel returns; any thread may call `run`, once."""

    __slots__ = ("_address", "_own")

    def __init__(self, address: int):
        self._address, self._own = address, None
        if not is_deleted_by_tensorflow():
            given = _Function.from_address(address)
            self._own = _Function.from_buffer_copy(given)
            given.manager = given.invoker = None

    def run(self) -> None:
        """Tell TensorFlow that the kernel is complete. Releases Python's lock meanwhile."""
        run = require_api().TF_RunAsyncOpKernelDoneCallback
        if self._own is None:
            run(self._address)
            return
        own = ctypes.addressof(self._own)
        run(own)
        _Manager(self._own.manager)(own, own, _DESTROY)


@cache
def is_deleted_by_tensorflow() -> bool | None:
    """Whether TF_RunAsyncOpKernelDoneCallback deletes the function; None: it is laid out in another way."""
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
