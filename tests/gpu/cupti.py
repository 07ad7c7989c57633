"""Counts this process's calls of CUDA's driver by CUPTI, a part of CUDA's toolkit and of TensorFlow's wheels.

https://docs.nvidia.com/cupti/main/main.html#cupti-callback-api. Counted calls take longer: the callback is in Python.
"""

import ctypes
import glob
import os
import sys
from collections import Counter
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int, c_uint32, c_uint64, c_void_p
from typing import Any

_DRIVER_API = 1  # CUPTI_CB_DOMAIN_DRIVER_API
_ENTER = 0  # CUPTI_API_ENTER


class _Data(Structure):
    _fields_ = [("site", c_int), ("name", c_char_p), ("params", c_void_p), ("result", c_void_p), ("symbol", c_char_p),
                ("context", c_void_p), ("context_number", c_uint32), ("correlation_data", POINTER(c_uint64)),
                ("correlation", c_uint32)]


_Callback = CFUNCTYPE(None, c_void_p, c_int, c_uint32, POINTER(_Data))


def find_cupti() -> str:
    """Return a path or a name by which CUPTI can be loaded; "" if there is none."""
    found = [path for folder in sys.path
             for path in sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libcupti.so*")))]
    for name in (*found, "libcupti.so", "libcupti.so.13", "libcupti.so.12"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return ""


class Calls:
    """A `with` context that counts calls by name in `number`. A process may use one at a time."""

    def __init__(self, library: Any = None):
        self.number: Counter[str] = Counter()
        self._library = library or ctypes.CDLL(find_cupti())
        self._subscriber = c_void_p()
        self._callback = _Callback(self._count)  # CUPTI has only the address.

    def _count(self, _: int, domain: int, number: int, data: Any) -> None:
        if data.contents.site == _ENTER:
            self.number[data.contents.name.decode()] += 1

    def __enter__(self) -> "Calls":
        self._check(self._library.cuptiSubscribe(ctypes.byref(self._subscriber), self._callback, None))
        self._check(self._library.cuptiEnableDomain(1, self._subscriber, _DRIVER_API))
        return self

    def __exit__(self, *_: object) -> None:
        self._check(self._library.cuptiUnsubscribe(self._subscriber))

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise OSError(f"CUPTI has failed with status {status}")
